"""The memory of a streamed step that runs, moment by moment and by cause: what `Schedule.timeline` predicts.

Bytes are counted op by op (`LiveBytes`). What a storage is held for shows in what it becomes: an input of a
segment, a state, a gradient. So the step is recorded first, and causes are found at its end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from streambp_fx.cost.held_bytes import (
    BODIES,
    DATA,
    HIDDEN,
    KEPT,
    LOSS,
    PARAMETERS,
    STATE,
    STATE_GRADIENTS,
    STORED,
    Moment,
)
from streambp_fx.measure.live_bytes import LiveBytes
from streambp_fx.passes.graph.facts import Kind
from streambp_fx.passes.s5_lower.lower import Lowered
from streambp_fx.passes.step.instructions import BufferKind
from streambp_fx.runtime.segments.segment_runner import SegmentRunner


@dataclass(frozen=True)
class Span:
    """A stretch of the step: a call of a program, or what is between two calls.

    Attributes:
        phase, segment, chunk, program: as in `Moment`.
        visit: which of the stretches of calls of the same segment in the same phase.
        cause: of what nobody but a program holds here.
        alive: bytes of each storage, by its number, when most was alive.
        lowered: the program.
        numbers: sizes of the call by the names that the program has for them.
    """

    phase: str
    segment: int
    chunk: int | None
    program: str | None
    visit: int
    cause: str
    alive: dict[int, int]
    lowered: Lowered | None = None
    numbers: dict[str, int] | None = None


class Timeline(LiveBytes):
    """Records a streamed step that runs within it, see `recorded`."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(known)
        self.spans: list[Span] = []
        self._number = itertools.count()
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        self._most, self._then = 0, {}  # type: ignore[var-annotated]
        self._causes: dict[int, list[tuple[int, str]]] = {}
        self._visit, self._at = 0, ("forward", 0, BODIES)
        self._lowered: Lowered | None = None

    # ---- what is alive

    def _freed(self, key: int) -> None:
        super()._freed(key)
        del self._alive[self._numbers.pop(key)]

    def _count(self, t: torch.Tensor) -> None:
        super()._count(t)
        key = t.untyped_storage()._cdata
        if key in self._sizes:
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = next(self._number)
            self._alive[number] = self._sizes[key]
        if self.live > self._most:
            self._most, self._then = self.live, dict(self._alive)

    def _close(self, chunk: int | None, program: str | None, **more: Any) -> None:
        phase, segment, cause = self._at
        if self._then:
            self.spans.append(Span(phase, segment, chunk, program, self._visit, cause, self._then, **more))
        self._most, self._then = self.live, dict(self._alive)

    # ---- what for

    def held_for(self, cause: str, tensors: Iterable[torch.Tensor]) -> None:
        """From this visit on, the storages of these tensors are held for this."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._causes.setdefault(number, []).append((self._visit, cause))

    def _cause(self, number: int, span: Span) -> str:
        """The last that was known in or before this visit, or the first after it."""
        known = self._causes.get(number, [])
        before = [cause for visit, cause in known if visit <= span.visit]
        return before[-1] if before else known[0][1] if known else span.cause

    def moments(self) -> list[Moment]:
        """The step: bytes over `known`, by cause, where most was alive in each stretch of it."""
        return [self.moment(span) for span in self.spans]

    def moment(self, span: Span) -> Moment:
        """The bytes of one stretch, by cause."""
        found: dict[str, int] = {}
        for number, size in span.alive.items():
            cause = self._cause(number, span)
            found[cause] = found.get(cause, 0) + size
        return Moment(span.phase, span.segment, span.chunk, span.program, found)

    # ---- hooks

    def called(self, call: Callable, runner: SegmentRunner, kind: str, *args: Any) -> list[Any]:
        """In the place of `SegmentRunner.call`."""
        block, step, index, frame, *_ = args
        self._close(None, None)
        segment, head = runner.segment, not runner.segment.mixings
        head = head and segment.index == len(runner.facts.segments) - 1
        of: dict[BufferKind, list[torch.Tensor]] = {}
        for buffer, value in frame.tensors.items():
            of.setdefault(buffer.kind, []).append(value)
        phase = "backward" if BufferKind.COTANGENT in of and kind != "loss" else "forward"
        at = (phase, segment.index, LOSS if head else BODIES)
        if at != self._at:
            self._visit, self._at = self._visit + 1, at
        values = call(runner, kind, *args)
        names = ("rows", "prefix", "low", "total")
        numbers = dict(zip(names, block.extent.sizes, strict=True))
        numbers |= {str(s): step.sizes[s] for s in runner.programs.symbols}
        self._close(index, kind, lowered=self._lowered, numbers=numbers)
        kinds = runner.facts.kinds
        for node, value in zip(segment.rows, of.get(BufferKind.ROWS, ()), strict=True):
            self.held_for(DATA if kinds.get(node) is Kind.WHOLE else STORED, [value])
        causes = {
            BufferKind.WHOLE: DATA,
            BufferKind.STATE: STATE,
            BufferKind.STATE_GRADIENT: STATE_GRADIENTS,
            BufferKind.SUM: PARAMETERS,
            BufferKind.COTANGENT: LOSS if kind == "loss" else HIDDEN,
            BufferKind.OUTPUT: LOSS if at[-1] == LOSS else STORED,
            BufferKind.GRADIENT: HIDDEN,
        }
        for what, cause in causes.items():
            self.held_for(cause, of.get(what, ()))
        self.held_for(KEPT, itertools.chain(*frame.kept.values()))
        self.held_for(at[-1], frame.workspace.values())
        return values

    def rounded(self, round_: Callable, runner: SegmentRunner, *args: Any) -> torch.Tensor:
        """In the place of `SegmentRunner.rounded`."""
        found = round_(runner, *args)
        self.held_for(PARAMETERS, [found])
        return found

    def used(self, program: Callable, runner: SegmentRunner, *args: Any) -> Lowered:
        """In the place of `SegmentRunner.program`."""
        self._lowered = program(runner, *args)
        return self._lowered


@contextlib.contextmanager
def recorded(known: Iterable[torch.Tensor] = ()) -> Iterator[Timeline]:
    """Within: the timeline of the steps that run. What they compile should be compiled before.

    Args:
        known: tensors that do not count: parameters, their gradients, the batch.
    """
    timeline = Timeline(known)
    with contextlib.ExitStack() as stack:
        hooks: dict[str, Callable] = {
            "call": timeline.called,
            "program": timeline.used,
            "rounded": timeline.rounded,
        }
        for name, hook in hooks.items():
            own = getattr(SegmentRunner, name)
            stack.enter_context(mock.patch.object(SegmentRunner, name, _in_place_of(own, hook)))
        stack.enter_context(timeline)
        yield timeline
    timeline._close(None, None)


def _in_place_of(own: Callable, hook: Callable) -> Callable:
    def method(runner: SegmentRunner, *args: Any) -> Any:
        return hook(own, runner, *args)

    return method
