"""Two runs of one graph that draw the same random numbers.

NOTE [random numbers in a self-check]: a streamed step draws the mask of a dropout chunk by chunk, so no two
masks could be compared: dropout drops nothing within a check, on both sides. Other ops that a step may draw
chunk by chunk (`rules.random_numbers`) give one number for all entries, which their distribution decides.
Every other random op runs whole in both, and is seeded by what it is called with: its name and the shapes of
its arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..passes.graph.facts import Facts, sum_dtype
from ..passes.graph.functionalization import drops_nothing
from ..passes.graph.op_arguments import bound
from ..passes.rules.random_numbers import DRAWS, IN_PLACE, PROBABILITIES, how_drawn
from ..passes.s4_trace import prefix_attention, random_numbers  # noqa: F401  (register their ops)
from .drawn_factors import Draw, draw_of, may_draw

aten = torch.ops.aten
# What `passes.s4_trace.chunk_ops` writes as a product with drawn factors, as people call it and as it is
# captured.
DROPOUTS = {functional.dropout, torch.dropout, torch.dropout_, aten.dropout.default, aten.dropout_.default}
ATTENTIONS = {functional.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}


@contextlib.contextmanager
def comparable(facts: Facts, devices: set[torch.device]) -> Iterator[Drawing]:
    """Within: dropout drops nothing, random ops draw what their arguments say, and no other mode is active.

    What it yields switches that off for a while.

    Args:
        facts: of the graph that is run.
        devices: whose random state must be as it was afterwards.
    """
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        drawing = Drawing()
        if any(may_draw(n) for n in facts.nodes):
            stack.enter_context(_NoDropout(drawing))
            stack.enter_context(_Seeded(drawing))
        yield drawing


class Drawing:
    """If random numbers are drawn as in any step."""

    def __init__(self) -> None:
        self.on = False
        self.draws: list[Draw] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within: they are, and `draws` are those of dropout."""
        self.on = True
        self.draws.clear()
        try:
            yield
        finally:
            self.on = False


class _NoDropout(TorchFunctionMode):
    """Dropout is the identity, and attention drops nothing."""

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()
        self.drawing = drawing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.drawing.on:
            return func(*args, **kwargs)
        if func in DROPOUTS:
            given = args[0] if args else kwargs["input"]
            # where gradients are off, what it gives has none, unless it gives back what it was given
            same = torch.is_grad_enabled() or not given.requires_grad or _gives_back(func, args, kwargs)
            return given if same else given.detach()
        if func in ATTENTIONS:
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if (given := _dropout_of(func, args, kwargs)) is not None:
            return func(**{**given, "dropout_p": 0.0})
        return func(*args, **kwargs)


def _dropout_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments, by name, of a function of Python's that hands a dropout on (attention of heads)."""
    if not inspect.isfunction(func) or "dropout_p" not in (signature := inspect.signature(func)).parameters:
        return None
    return dict(signature.bind(*args, **kwargs).arguments)


def _gives_back(func: Any, args: Any, kwargs: Any) -> bool:
    """True for a dropout that drops nothing, and for one in place."""
    in_place = func in (torch.dropout_, aten.dropout_.default) or kwargs.get("inplace", args[3:4] == (True,))
    return bool(in_place) or drops_nothing(*args, **kwargs)


class _Seeded(TorchDispatchMode):
    """Random ops are seeded by what they are called with."""

    supports_higher_order_operators = True

    def __init__(self, drawing: Drawing) -> None:
        super().__init__()
        self.drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_dropout = func is torch.ops.streambp_fx.dropout_factors.default and type(args[0]) is Tensor
        if self.drawing.on:
            found = func(*args, **kwargs)
            if is_dropout:
                self.drawing.draws.append(draw_of(found, *args[1:]))
            return found
        if is_dropout:
            return torch.ones_like(args[0])
        same = _same_everywhere(func, args, kwargs)
        if same is not None:
            return same
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(_seed(func, args, kwargs))
        return func(*args, **kwargs)


def _same_everywhere(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What an op gives that a step may draw chunk by chunk: one number; None for any other op."""
    if func is torch.ops.streambp_fx.random_numbers.default:
        size, method, parameters, _, dtype, device = args
        if not all(isinstance(n, int) for n in size):
            return None  # it is traced
        return torch.full(size, _typical(method, tuple(parameters)), dtype=dtype, device=device)
    op = IN_PLACE.get(func, func)
    if (op not in DRAWS and op not in PROBABILITIES) or isinstance(args[0], FakeTensor):
        return None
    call = bound(func, args, kwargs)
    if op in DRAWS:
        made = torch.full_like(args[0], _typical(*how_drawn(op, call)), dtype=call.get("dtype"))
    else:
        probable = call[PROBABILITIES[op]]
        drawn = torch.full_like(probable, _typical("uniform_", (0.0, 1.0)), dtype=sum_dtype(probable.dtype))
        made = (drawn < probable).to(args[0].dtype)
    return args[0].copy_(made) if func in IN_PLACE else made


def _typical(method: str, parameters: tuple[float, ...]) -> float:
    """A number of a distribution: always the same, in any dtype."""
    numbers = torch.Generator(device="cpu").manual_seed(2)
    given = [int(p) if method == "random_" else p for p in parameters]
    made = torch.empty(1, dtype=torch.float64, device="cpu")
    return float(getattr(made, method)(*given, generator=numbers))


def _seed(func: Any, args: Any, kwargs: Any) -> int:
    """Of a random op: the same in every run, and in the functional form of the op."""
    name = func._schema.name.removesuffix("_").removesuffix("_functional")
    leaves = pytree.tree_leaves((args, kwargs))
    told = [tuple(v.shape) if isinstance(v, Tensor) else str(v) for v in leaves if not _is_place(v)]
    return zlib.crc32(f"{name} {told}".encode())


def _is_place(value: Any) -> bool:
    """True for what differs between forms of one op and not between what they draw."""
    return value is None or isinstance(
        value, (torch.dtype, torch.device, torch.layout, torch.memory_format, bool)
    )
