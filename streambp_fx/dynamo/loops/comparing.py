"""Compares scans with the loops that they stand for, on a few rows. See NOTE [compared with the loop]."""

from __future__ import annotations

import contextlib
import logging
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.convert_frame import convert_frame_assert
from torch._dynamo.hooks import Hooks
from torch._dynamo.types import ConvertFrameReturn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from ...checking.rounding import RTOL
from ...checking.short_steps import VANISHING, Outcome, differences, run
from ...errors import held_warnings, warn
from ...passes.graph.facts import expression
from ...passes.s1_capture.loops.scans import with_plain_loops
from ..this_backend import MARK
from .effects import NotComparable, compare_effects
from .inlining import SCAN
from .record import LoopRecord, names_of_inputs, recorded
from .revealing import Revealing
from .trials import ENOUGH, TRIALS, Trial, drawn, ordinary, same_random_numbers

log = logging.getLogger(__name__)

# Numbers of rows: the first that the graph was captured for. Six: what is toggled, or counted by two, three
# or four, is then not what it is after one row.
ROWS = (6, 7, 5, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 128)
# Most rows of a loop that always has as many.
MOST = 64
# By how much more the functions of `Revealing` may enlarge rounding.
ROUGH = 100


def with_compared_loops(frame: Any, compiled: Callable[[], ConvertFrameReturn]) -> ConvertFrameReturn:
    """Compile a frame. If loops were taken for steps and are none, compile it again with these unrolled.

    Args:
        frame: as Dynamo hands it over.
        compiled: compiles it.
    """
    record, held = LoopRecord(), list[str]()
    try:
        with recorded(record):
            while True:
                with held_warnings() as held:
                    found = compiled()
                why = _why_not(frame, found, record)
                if why is None:
                    return found
                log.info("loops of %s are unrolled: %s", frame.f_code.co_name, why)
                record.graph = None
                for code in list(record.taken):
                    record.refuse(code, why)
    finally:
        for text in held:
            warn(text)


def _why_not(frame: Any, found: ConvertFrameReturn, record: LoopRecord) -> str | None:
    """Why the scans of a frame cannot stand for its loops; None if they can."""
    if not record.taken or found.guarded_code is None:
        return None
    try:
        if record.graph is None:
            raise NotComparable("no graph of it was compiled")
        scanned = _Scanned(*record.graph)
        if scanned.is_abstract:
            return None
        unrolled = _unrolled(frame, scanned)
        compare_effects(found.guarded_code.code, unrolled.code)
        return scanned.differs_from(unrolled)
    except NotComparable as error:
        return f"a step of it cannot be compared with the loop: {error}"
    except Exception as error:
        log.info("loops could not be compared", exc_info=True)
        first = str(error).split("\n")[0]
        return f"a step of it cannot be compared with the loop: {type(error).__name__}: {first}"


@dataclass
class _Unrolled:
    """A frame as it is traced for a few rows with its loops as they are.

    Attributes:
        code: what Dynamo makes of it, which calls the graph.
        module: the graph.
        inputs: of the graph.
        names: the expressions of its inputs.
    """

    code: types.CodeType | None = None
    module: GraphModule | None = None
    inputs: Sequence[Any] = ()
    names: Sequence[str] = ()


def _unrolled(frame: Any, scanned: _Scanned) -> _Unrolled:
    """Trace a frame again, for a few rows. Nothing of it is run.

    Raises:
        NotComparable: it cannot be, or not all that has rows can be cut.
    """
    found = _Unrolled()

    def keep(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.module, found.inputs, found.names = module, list(inputs), names_of_inputs(module)
        return module.forward

    setattr(keep, MARK, True)
    code = frame.f_code.replace(co_name=f"{frame.f_code.co_name}_of_few_rows")  # with no sizes of its own yet
    short: Any = types.SimpleNamespace(
        f_code=code,
        f_globals=frame.f_globals,
        f_builtins=frame.f_builtins,
        f_locals=scanned.cut(frame.f_locals),
        closure=frame.closure,
    )
    # all sizes are numbers, whatever other calls had
    settings = torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False)
    with settings, recorded(LoopRecord(unrolls_all=True)):
        made = convert_frame_assert(keep, one_graph=False)(short, None, Hooks(), {})
    if made.guarded_code is None or found.module is None:
        raise NotComparable("the loop itself is not traced")
    found.code = made.guarded_code.code
    return found


class _Scanned:
    """A graph with scans, and the few rows on which it is compared.

    Args:
        module: the graph.
        inputs: of the real call.

    Raises:
        NotComparable: there is no number of rows for which it can be.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> None:
        self.module, self.inputs, self.names = module, inputs, names
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.sizes = {} if self.is_abstract else self._few_rows()
        if not self.is_abstract:
            self._refuse_inputs()

    def _refuse_inputs(self) -> None:
        for name, value in zip(self.names, self.inputs, strict=True):
            if not isinstance(value, Tensor):
                continue
            if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
                raise NotComparable(f"{name} is a {type(value).__name__}, {value.layout}")
            if value.numel() and not value.untyped_storage().nbytes():
                raise NotComparable(f"{name} is stored elsewhere")

    @property
    def is_abstract(self) -> bool:
        """True if its parameters have no numbers: nothing is computed with it."""
        tensors = [v for v in self.inputs if isinstance(v, Tensor)]
        own = [v for v in tensors if isinstance(v, torch.nn.Parameter)] or tensors
        return all(isinstance(v, FakeTensor) or v.device.type == "meta" for v in own)

    # ---- sizes

    def _few_rows(self) -> dict[sympy.Symbol, int]:
        """The value of each symbol: that of the call, or a few rows where loops go over it."""
        lengths = list(_lengths(self.module))
        if not lengths:
            raise NotComparable("nothing becomes of it")
        if any(isinstance(n, int) and n > MOST for n in lengths):
            raise NotComparable(f"it goes over more than {MOST} rows, and always as many")
        sizes: list[Any] = [n for n in lengths if isinstance(n, torch.SymInt)]
        rows = {s for n in sizes for s in expression(n).free_symbols}
        inputs = (n.meta.get("example_value") for n in self.placeholders)
        sizes += [s for v in inputs for s in (v.shape if isinstance(v, Tensor) else (v,))]
        env = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
        if env is None:
            return {}
        values = {symbol: int(value) for symbol, value in env.backed_var_to_val.items()}
        alike = {s for s, value in values.items() if value in {values[r] for r in rows}}
        for count in ROWS:
            for symbols in (alike, rows):  # another input may have as many rows
                few = values | dict.fromkeys(symbols, count)
                if all(g.expr.subs(few) == sympy.true for g in env.guards):
                    return few
        raise NotComparable("its capture assumed sizes that no short sequence has")

    def _size(self, size: int | torch.SymInt) -> int:
        return int(expression(size).subs(self.sizes))

    def _shape(self, node: Node) -> list[int]:
        return [self._size(size) for size in node.meta["example_value"].shape]

    # ---- inputs

    def cut(self, values: Any) -> Any:
        """Variables of the frame, with a few rows of what has rows.

        Raises:
            NotComparable: something that has rows is not among them.
        """
        pairs = list(zip(self.placeholders, self.inputs, strict=True))
        short = {id(v): self._rows(n, v) for n, v in pairs if self._is_long(n, v)}
        missing = set(short)

        def replaced(value: Tensor) -> Tensor:
            missing.discard(id(value))
            return short.get(id(value), value)

        found = pytree.tree_map_only(Tensor, replaced, dict(values))
        if missing:
            names = [n for n, v in zip(self.names, self.inputs, strict=True) if id(v) in missing]
            raise NotComparable(f"{', '.join(names)} cannot be cut to a few rows")
        return found

    def _is_long(self, node: Node, value: Any) -> bool:
        return isinstance(value, Tensor) and self._shape(node) != list(value.shape)

    def _rows(self, node: Node, value: Tensor, spread: bool = False) -> Tensor:
        """A few rows: the first ones, or some from the first to the last."""
        found = value.detach()
        for dim, count in enumerate(self._shape(node)):
            size = value.shape[dim]
            if count != size:
                last = size - 1 if spread or count > size else count - 1
                places = torch.linspace(0, last, count, dtype=torch.float64, device=value.device).long()
                found = found.index_select(dim, places)
        return found.clone().requires_grad_(value.requires_grad)

    def _given(self, unrolled: _Unrolled, trial: Trial) -> dict[str, Any]:
        """Inputs of both graphs by their expression."""
        found: dict[str, Any] = dict(zip(unrolled.names, unrolled.inputs, strict=True))
        for name, node, value in zip(self.names, self.placeholders, self.inputs, strict=True):
            if isinstance(value, Tensor):
                found[name] = self._rows(node, value, trial.spread) if self._is_long(node, value) else value
            else:
                size = node.meta.get("example_value")
                found[name] = self._size(size) if isinstance(size, torch.SymInt) else value
        change = drawn if trial.draws else ordinary
        return {n: change(v, k) if isinstance(v, Tensor) else v for k, (n, v) in enumerate(found.items())}

    # ---- comparing

    def differs_from(self, unrolled: _Unrolled) -> str | None:
        """In what the loop differs from the scan; None if in nothing.

        Raises:
            NotComparable: there is nothing finite to compare.
        """
        compared = 0
        for trial in TRIALS:
            try:
                expected, found, rtol = self._both(unrolled, trial)
            except _DrawnInVain:
                continue
            if len(expected.outputs) != len(found.outputs):
                return "a step of it gives another number of results than the loop"
            if not _is_finite(expected):
                continue
            compared += 1
            floor = VANISHING * expected.total
            worst = max(differences(expected, found), key=lambda d: d.relative(floor), default=None)
            if worst is not None and not worst.relative(floor) <= rtol:
                where = f" {trial.words}" if trial.words else ""
                return f"a step of it does not give what the loop gives: {worst.what} differs{where}"
        if compared < ENOUGH:
            raise NotComparable("its results on a few rows are not finite")
        return None

    def _both(self, unrolled: _Unrolled, trial: Trial) -> tuple[Outcome, Outcome, float]:
        """What the loop gives and what the scan gives, and by how much they may differ.

        Raises:
            _DrawnInVain: the loop does not run on the numbers that were drawn.
        """
        assert unrolled.module is not None
        given = self._given(unrolled, trial)
        values, order = list(given.values()), {name: k for k, name in enumerate(given)}
        tensors = [v for v in values if isinstance(v, Tensor)]
        found: list[Outcome] = []
        for module, names in ((unrolled.module, unrolled.names), (self.module, self.names)):
            call = _Call(module, [order[n] for n in names])
            mode = Revealing() if trial.reveals else contextlib.nullcontext()
            try:
                with same_random_numbers(tensors):
                    whole = _unchanged(call, values)
                    with mode:
                        found.append(run(call, values, whole, wanted=() if trial.reveals else None))
            except Exception as error:
                if trial.draws and not found:
                    raise _DrawnInVain from error
                raise
        compared = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
        compared += [v for outcome in found for v in outcome.outputs if isinstance(v, Tensor)]
        rtol = max((RTOL[v.dtype] for v in compared if v.dtype in RTOL), default=RTOL[torch.float32])
        return found[0], found[1], min(rtol * ROUGH, 0.1) if trial.reveals else rtol


class _DrawnInVain(Exception):
    pass


def _lengths(module: GraphModule) -> Iterator[Any]:
    """How many rows each scan of a graph goes over."""
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    for node in (n for g in graphs for n in g.nodes if n.target is SCAN):
        rows = node.args[2]
        yield rows[0].meta["example_value"].shape[0]


def _is_finite(outcome: Outcome) -> bool:
    values = [v for v in outcome.outputs if isinstance(v, Tensor)]
    return all(bool(v.isfinite().all()) for v in values) and math.isfinite(outcome.total)


class _Call:
    """Runs a graph on those of some values that are its inputs."""

    def __init__(self, module: GraphModule, positions: Sequence[int]) -> None:
        self.module, self.positions = with_plain_loops(module), positions

    def __call__(self, *values: Any) -> Any:
        return Interpreter(self.module).run(*(values[k] for k in self.positions))


def _unchanged(call: _Call, values: Sequence[Any]) -> frozenset[int]:
    """Positions of parameters that a graph leaves as they are."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(v.detach()) if isinstance(v, Tensor) else v for v in values]
    with mode, torch.no_grad():
        call(*fakes)
    kept = (k for k, v in enumerate(fakes) if isinstance(v, Tensor) and not v._version)
    return frozenset(k for k in kept if isinstance(values[k], torch.nn.Parameter))
