"""Cases that try to get a wrong loss, gradient, buffer or side effect out of the compiler.

A case is a model and a scenario: what is done with it. The scenario runs on the eager model and on a streamed
copy, through both doors, and all that it records must agree. A case says what is expected to be streamed.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from e2e_check import assert_close_grads, grads
from e2e_subject import VOCAB, Block, Subject, generator_of, token_loss
from torch import Tensor, nn

import streambp_fx
from streambp_fx.backend import schedules_of
from streambp_fx.transform import schedules

# What a case may be expected to be. "unchunked": segments, none of which is chunked. These three come with a
# warning. "silent" is not all streamed and no warning; "refused" a CaptureError.
STREAMED, PARTLY, UNCHUNKED, UNSTREAMED = "streamed", "partly", "unchunked", "unstreamed"
SILENT, REFUSED = "silent", "refused"
WARNED = "|".join((PARTLY, UNCHUNKED, UNSTREAMED))
WHATEVER = f"{STREAMED}|{WARNED}"
DOORS = ("compile", "transform")
CHUNK, LOSS_CHUNK = 8, 5
RTOL = 1e-8


@dataclass
class Record:
    """What a scenario saw, in order."""

    seen: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, name: str, value: Any) -> None:
        self.seen.append((name, torch.utils._pytree.tree_map(_snapshot, value)))

    def step(self, model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One training step from clean gradients: output, gradients, buffers and parameters are recorded."""
        model.zero_grad()
        output = call(*args, **kwargs)
        total(output).backward()
        self("output", output)
        self.state(model)
        return output

    def state(self, model: nn.Module) -> None:
        self("gradients", grads(model))
        self("buffers", dict(model.named_buffers()))
        self("parameters", dict(model.named_parameters()))


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def total(output: Any) -> Tensor:
    """A number to differentiate: the sum of all values of an output that have a gradient."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]
    return sum(
        (t if t.dim() == 0 else (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum())
        for t in parts
    )  # type: ignore[return-value]


Scenario = Callable[[Any, Callable[..., Any], Record], None]


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = generator_of(1000 * seed + 10 * length + batch)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def two_steps(model: Any, call: Callable[..., Any], record: Record) -> None:
    """Two lengths and batch sizes, neither a multiple of the chunk."""
    for step, (batch, length) in enumerate(((2, 33), (3, 21))):
        torch.manual_seed(step)
        record.step(model, call, tokens(batch, length))


@dataclass(frozen=True)
class Case:
    """One adversary.

    Attributes:
        name: of the case.
        kind: its class.
        make: makes the model, given the door.
        want: what of it is expected to be streamed, by door; several are allowed with "|". A door that is not
            there is not tried.
        scenario: what is done with it.
        against: "eager"; "differences", finite ones, with equal random numbers; "differences, any chunk" if
            what is drawn does not depend on the chunk either; "none": the scenario asserts what it wants.
        options: of the compiler, beside the chunks.
        members: what the case is made of; each is run alone where the whole fails.
    """

    name: str
    kind: str
    make: Callable[[str], nn.Module]
    want: Mapping[str, str]
    scenario: Scenario = two_steps
    against: str = "eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[Case, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"


class Cases:
    """The cases of one class, filled by decorators; random models are made of `menu` and `losses`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.all = kind, dict[str, Case]()
        self.menu: dict[str, tuple[Block, Any]] = {}
        self.losses: dict[str, tuple[Block, Any]] = {}

    def add(self, name: str, make: Callable[[str], nn.Module], want: Any, **more: Any) -> None:
        assert name not in self.all, name
        wants = dict.fromkeys(DOORS, want) if isinstance(want, str) else want
        self.all[name] = Case(name, self.kind, make, wants, **more)

    def block(self, want: Any = STREAMED, parts: Any = None, name: str = "", **more: Any) -> Any:
        """A decorator for (model, x, ids) -> x. `transform` meets it before the attention, compile after."""

        def note(block: Block) -> Block:
            self.menu[name or _spoken(block)] = block, parts
            self.add(
                name or _spoken(block),
                lambda door: Subject(block, parts=parts, before=door == "transform"),
                want,
                **more,
            )
            return block

        return note

    def blocks(self, blocks: Mapping[str, Block], want: str = STREAMED) -> None:
        """Several blocks in one model, since compiling it takes the time."""

        def together(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
            for block in blocks.values():
                x = m.norm(block(m, x, ids))
            return x

        alone = Cases(self.kind)
        for name, block in blocks.items():
            alone.block(want, name=name)(block)
        name = " + ".join(blocks)
        self.block(want, name=name, members=tuple(alone.all.values()))(together)
        del self.menu[name]
        self.menu |= alone.menu

    def loss(self, want: Any = STREAMED, parts: Any = None, name: str = "", **more: Any) -> Any:
        """A decorator for (model, x, ids) -> what the forward returns."""

        def note(loss: Block) -> Block:
            self.losses[name or _spoken(loss)] = loss, parts
            self.add(name or _spoken(loss), lambda door: Subject(loss=loss, parts=parts), want, **more)
            return loss

        return note

    def scenario(
        self,
        want: Any = STREAMED,
        make: Any = None,
        block: Any = None,
        parts: Any = None,
        name: str = "",
        **more: Any,
    ) -> Any:
        """A decorator for (model, call, record) -> None."""

        def note(scenario: Scenario) -> Scenario:
            made = make or (lambda door: Subject(block, token_loss, parts))
            self.add(name or _spoken(scenario), made, want, scenario=scenario, **more)
            return scenario

        return note


def _spoken(function: Any) -> str:
    return function.__name__.strip("_").replace("_", " ")


# ---- running


@dataclass
class Run:
    """What became of a case: what was streamed, what was warned of, and the record."""

    outcome: str
    warned: list[str]
    record: Record


def options_of(case: Case) -> dict[str, Any]:
    """Of the compiler: no self-check, and errors are raised, so that nothing hides what is wrong."""
    plain = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK, "check": "never", "on_error": "raise"}
    return {**plain, **case.options}


@contextmanager
def our_warnings() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]


def streamed(model: nn.Module, door: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if door == "compile":
        return torch.compile(model, backend="streambp", options=dict(options))
    return streambp_fx.transform(model, **options)


def outcome(model: nn.Module, warned: list[str]) -> str:
    """How much of a model is streamed."""
    found = schedules(model)
    segments = [
        s for schedule in (schedules_of(model) if found is None else found) for s in schedule.segments
    ]
    if all(s.chunked for s in segments) and segments and not warned:
        return STREAMED
    if not warned:
        return SILENT
    if any(s.chunked for s in segments):
        return PARTLY
    return UNCHUNKED if segments else UNSTREAMED


def run(case: Case, door: str) -> Run:
    torch._dynamo.reset()
    eager = case.make(door)
    copied = copy.deepcopy(eager)
    want, got = Record(), Record()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.scenario(eager, eager, want)
    with our_warnings() as warned:
        call = streamed(copied, door, options_of(case))
        torch.manual_seed(0)
        try:
            case.scenario(copied, call, got)
        except streambp_fx.CaptureError as error:
            return Run(REFUSED, [str(error)], got)
        if case.against.startswith("differences"):
            compare_with_differences(copied, call)
    result = Run(outcome(copied, warned), warned, got)
    if case.against.endswith("any chunk"):
        assert_same_for_any_chunk(case, door)
    if case.against == "eager":
        compare(got, want)
    return result


def check(case: Case, door: str) -> None:
    """Exact, and streamed as far as the case says."""
    try:
        result = run(case, door)
        expected = case.want[door].split("|")
        assert result.outcome in expected, f"{result.outcome}, expected {case.want[door]}: {result.warned}"
    except Exception as error:
        alone = {m.name: failure(m, door) for m in case.members}
        causes = [f"{name}: {why}" for name, why in alone.items() if why]
        raise AssertionError("\n".join(causes) or f"{type(error).__name__}: {error}") from error


def failure(case: Case, door: str) -> str:
    """What is wrong with a case; empty if nothing is."""
    try:
        check(case, door)
    except Exception as error:
        return str(error)
    return ""


def compare(got: Record, want: Record) -> None:
    """Two records agree: names, order, nesting, shapes, dtypes, None, and values to rounding."""
    assert [n for n, _ in got.seen] == [n for n, _ in want.seen]
    for position, ((name, a), (_, b)) in enumerate(zip(got.seen, want.seen, strict=True)):
        where = f"{name} ({position})"
        if name == "gradients" and _any(b):
            assert_close_grads(_plain(a), _plain(b), RTOL, where)
            continue
        mine, spec = torch.utils._pytree.tree_flatten(a)
        theirs, other = torch.utils._pytree.tree_flatten(b)
        assert spec == other, f"{where}: {spec} against {other}"
        for x, y in zip(mine, theirs, strict=True):
            _compare_leaves(x, y, where)


def _any(gradients: Mapping[str, Any]) -> bool:
    """False for a step that has no rows, whose gradients are None and zeros: they are compared one by one."""
    return any(g is not None and bool(g.to_dense().any()) for g in gradients.values())


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients as dense, real tensors; whether they were sparse is compared as one more."""
    dense = {n: g.to_dense() if g is not None and g.is_sparse else g for n, g in found.items()}
    dense = {n: torch.view_as_real(g) if g is not None and g.is_complex() else g for n, g in dense.items()}
    return {**dense, **{f"{n}, sparse": None for n, g in found.items() if g is not None and g.is_sparse}}


def _compare_leaves(x: Any, y: Any, where: str) -> None:
    if not isinstance(y, Tensor):
        assert x == y or (isinstance(x, float) and x == _approximately(y)), f"{where}: {x} against {y}"
        return
    assert isinstance(x, Tensor) and x.dtype == y.dtype and x.shape == y.shape, f"{where}: {x} against {y}"
    same = torch.isclose(x, y, rtol=RTOL, atol=1e-11, equal_nan=True)
    assert bool(same.all()), f"{where}: {x.flatten()[:4]} against {y.flatten()[:4]}"


def _approximately(value: float) -> float:
    return value


def compare_with_differences(model: nn.Module, call: Callable[..., Any], eps: float = 1e-6) -> None:
    """Each gradient along a random direction against the central difference, with equal random numbers."""
    ids = tokens(2, 33)

    def loss() -> Tensor:
        torch.manual_seed(11)
        return total(call(ids))

    model.zero_grad()
    value = loss()
    value.backward()
    assert math.isfinite(float(value))
    generator = generator_of(5)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        direction /= direction.norm()
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * eps)
            sides.append(float(loss().detach()))
            with torch.no_grad():
                parameter.sub_(direction, alpha=sign * eps)
        difference = (sides[0] - sides[1]) / (2 * eps)
        found = 0.0 if parameter.grad is None else float((parameter.grad * direction).sum())
        assert abs(found - difference) <= 1e-4 * max(abs(difference), 1e-3), f"{name}: {found}, {difference}"


def assert_same_for_any_chunk(case: Case, door: str) -> None:
    """What is drawn for a parameter, a sample or a step is drawn once, however many chunks there are."""
    losses = []
    for chunk in (CHUNK, 64):
        torch._dynamo.reset()  # which drops what was compiled before
        model = case.make(door)
        call = streamed(model, door, {**options_of(case), "chunk": chunk, "loss_chunk": chunk})
        torch.manual_seed(11)
        with our_warnings():
            losses.append(float(total(call(tokens(2, 33))).detach()))
    assert abs(losses[0] - losses[1]) < 1e-9 * abs(losses[1]), f"chunks of 8 and 64 rows: {losses}"
