"""The loops of several procedures as one: each chunk goes through all of them before the next one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...step.instructions import Buffer, BufferKind, Free, Instruction
from .instructions import BACKWARD, FORWARD, Call, StepInstruction

#: What is there for one chunk alone, of a segment that others hand rows to or take them from.
OF_CHUNK = (BufferKind.ROWS, BufferKind.COTANGENT, BufferKind.KEPT)


@dataclass(frozen=True)
class HandOn:
    """The chunk's rows of a buffer become those of another segment, as `taken`, and are here no more."""

    buffer: Buffer
    segment: int
    taken: Buffer


@dataclass(frozen=True)
class Within:
    """What is done in the call of one segment."""

    call: Call
    instruction: Instruction | HandOn


@dataclass(frozen=True)
class OneLoop:
    """Several procedures with a loop over chunks each, as one loop.

    Attributes:
        calls: of the procedures, in the order in which a chunk goes through them; several may be of one
            segment, and are given the same rows.
        before: what is done before the loop.
        body: on each chunk.
        after: what is done after the loop.
        reverse: from the last chunk to the first.
    """

    calls: tuple[Call, ...]
    before: tuple[Within, ...]
    body: tuple[Within, ...]
    after: tuple[Within, ...]
    reverse: bool


def one_loop(calls: Sequence[Call], reverse: bool) -> OneLoop:
    """Join the loops of procedures, see NOTE [chunks first] in `passes.step.build`.

    What a call hands on goes to the next one. What is there of a chunk is let go after the last call of its
    segment.

    Args:
        calls: in the order in which a chunk goes through them.
    """
    before: list[Within] = []
    body: list[Within] = []
    after: list[Within] = []
    for place, call in enumerate(calls):
        first, loop, then = call.procedure.around_loop()
        before += [Within(call, i) for i in first]
        body += [Within(call, i) for i in loop.body]
        body += [Within(call, i) for i in _handed_on(call, calls[place + 1 : place + 2])]
        if all(later.segment != call.segment for later in calls[place + 1 :]):
            body += [Within(call, Free(b)) for b in call.procedure.passing if b.kind in OF_CHUNK]
        after += [Within(call, i) for i in then]
    return OneLoop(tuple(calls), tuple(before), tuple(body), tuple(after), reverse)


def _handed_on(call: Call, following: Sequence[Call]) -> Iterator[HandOn | Free]:
    """Rows go to the next segment, gradients of rows as well; what nobody takes is let go."""
    backward = call.procedure_name == "backward"
    gives = passed(call, BufferKind.GRADIENT if backward else BufferKind.OUTPUT)
    if gives is None:
        return
    takes = BufferKind.COTANGENT if backward else BufferKind.ROWS
    taken = (passed(c, takes) for c in following if c.procedure_name == call.procedure_name)
    buffer = next(taken, None)
    yield Free(gives) if buffer is None else HandOn(gives, following[0].segment, buffer)


def passed(call: Call, kind: BufferKind) -> Buffer | None:
    """What of this kind a call takes from its neighbour, or hands to it."""
    return next((b for b in call.procedure.passing if b.kind is kind), None)


@dataclass(frozen=True, kw_only=True)
class ChunksFirst(StepInstruction):
    """Neighbouring segments whose loops run as one, see NOTE [chunks first] in `passes.step.build`.

    Rows go from one to the next a chunk at a time, and are no values of the step.

    Attributes:
        body: a call of each segment, in the order in which a chunk goes through them.
        again: in the backward: calls that each chunk goes through before.
    """

    body: tuple[Call, ...]
    again: tuple[Call, ...] = ()
    holds = ("again", "body")
    places = FORWARD | BACKWARD

    @cached_property
    def loop(self) -> OneLoop:
        """All of it as one loop: a backward goes from the last chunk to the first."""
        return one_loop((*self.again, *self.body), reverse=bool(self.again))
