"""build: the instructions of a segment's step, from what its chunk programs read and make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import Node

from .instructions import (
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Instruction,
    Keep,
    Normalize,
    Over,
    Overwrite,
    Procedure,
    Receive,
    ReduceScatter,
    Round,
    Run,
    Scale,
    Send,
    WriteRows,
    ZeroRows,
)
from .saving import Piece, shares

if TYPE_CHECKING:
    from ..s5_lower.programs import SegmentPrograms


@dataclass(frozen=True)
class Way:
    """What the instructions of a segment depend on besides its programs.

    Attributes:
        full: some row may read all rows.
        left_out: some rows of some samples are not run.
        overwrites: buffers whose memory the gradient of a streamed input takes, if nobody else holds it: the
            cotangent in a backward, the input itself in a loss.
        half: float16 occurs in a loss.
        several: each of several devices runs its own rows, see NOTE [rows on several devices].
        saves: what is kept of which rows for the backward, besides the inputs; nothing if it is empty.
    """

    full: bool = False
    left_out: bool = False
    overwrites: frozenset[Buffer] = frozenset()
    half: bool = False
    several: bool = False
    saves: tuple[Piece, ...] = ()


class Builder:
    """Makes the procedures of one distinct segment.

    NOTE [rows on several devices]: what a row reads of rows on other devices is in the states, and nowhere
    else. So each device fills its own rows of a state, and all of them are gathered before the first chunk
    reads. In the backward a device differentiates its rows with what its own chunks have added to a state
    gradient; what the others have added is summed, and pulled back once more: a VJP is linear. States that
    are made of other states (chained ones, and those of recurrences) are filled by one device after the
    other, and their gradients come back in reverse.

    Args:
        programs: its chunk programs.
        way: how they are run.
    """

    def __init__(self, programs: SegmentPrograms, way: Way) -> None:
        self.programs, self.way = programs, way
        self.states = list(programs.buffers(BufferKind.STATE))
        self.outputs = [Buffer(BufferKind.OUTPUT, n) for n in programs.segment.outputs]
        self.gradients = [Buffer(BufferKind.GRADIENT, n) for n in programs.diff_rows]
        self.sums = list(programs.buffers(BufferKind.SUM))
        self.state_gradients = list(programs.buffers(BufferKind.STATE_GRADIENT))
        self.cotangents = list(programs.buffers(BufferKind.COTANGENT))
        self.kept = (Buffer(BufferKind.KEPT),) if way.saves else ()
        several = way.several and bool(self.states)
        self.in_turn = several and programs.in_turn
        self.at_once = several and not self.in_turn

    def forward(self) -> Procedure:
        """The outputs, and what is kept of each chunk."""
        body: list[Instruction] = [Allocate(b, zero=self.way.left_out) for b in self.outputs]
        body += self._memory_of_states()
        filled = self.way.full or self.at_once
        body += self._fill_states(()) if filled else map(Receive, self.states if self.in_turn else ())
        run = Run(
            "forward",
            self._inputs("forward"),
            results=(*self.outputs, *self.kept),
            writes=() if filled else tuple(self.states),
        )
        body += self._loops(run, *map(WriteRows, self.outputs), *map(Keep, self.kept))
        body += map(Send, self.states if self.in_turn else ())
        body += map(Free, self.states)
        return Procedure("forward", self._given(), tuple(body), (*self.outputs, *self.kept), self.way.several)

    def backward(self) -> Procedure:
        """Gradients of the streamed inputs, and of the constants."""
        body: list[Instruction] = [*self._memory_of_states(), *self._fill_states(self.kept)]
        body += [Allocate(b, zero=True) for b in (*self.state_gradients, *self.sums)]
        body += self._memory_of_gradients(BufferKind.COTANGENT)
        joint = Run(
            "joint",
            self._inputs("joint", self.kept),
            results=tuple(self.gradients),
            adds=(*self.state_gradients, *self.sums),
            finishes=() if self.way.full else tuple(self.state_gradients),
        )
        in_turn = self.state_gradients if self.in_turn else ()
        body += map(Receive, in_turn)
        body += self._loops(joint, *map(WriteRows, self.gradients), reverse=True)
        body += map(Send, in_turn)
        if self.at_once:
            body += [ReduceScatter(b, others=not self.way.full) for b in self.state_gradients]
        if (self.way.full or self.at_once) and self.states:
            rows = [WriteRows(b, add=True) for b in self.gradients]
            last = Run(
                "state_joint",
                self._inputs("state_joint"),
                results=tuple(self.gradients),
                adds=tuple(self.sums),
                finishes=tuple(self.state_gradients),
                own=True,
            )
            body.append(Chunks((last, *rows)))
        body += map(Free, (*self.states, *self.state_gradients))
        body += map(Round, self.sums)
        given = (*self.cotangents, *self._given(), *self.kept)
        return Procedure("backward", given, tuple(body), (*self.gradients, *self.sums), self.way.several)

    def loss(self) -> Procedure:
        """Values by rows, and all gradients for a unit gradient of the loss: the cotangents are its own."""
        body: list[Instruction] = [Allocate(b, zero=True) for b in self.outputs]
        body += map(Normalize, self.cotangents if self.way.half else ())
        body += [Allocate(b, zero=True) for b in self.sums]
        body += self._memory_of_gradients(BufferKind.ROWS)
        results = (*self.outputs, *self.gradients)
        run = Run("loss", self._inputs("loss"), results, adds=tuple(self.sums))
        body.append(Chunks((run, *map(WriteRows, results)), over=Over.COUNTED))
        body.append(Chunks(tuple(map(ZeroRows, self.gradients)), over=Over.NOT_COUNTED))
        given = (*self.cotangents, *self._given())
        return Procedure("loss", given, tuple(body), (*results, *self.sums), self.way.several)

    def scaling(self) -> Procedure:
        """What the backward of a loss has left to do, once the gradient of the loss is known."""
        made = (*self.gradients, *self.sums)
        return Procedure("scaling", made, (*map(Scale, made), *map(Round, self.sums)), made, self.way.several)

    # ---- parts

    def _given(self) -> tuple[Buffer, ...]:
        kinds = (BufferKind.ROWS, BufferKind.CONSTANT, BufferKind.WHOLE)
        return tuple(b for kind in kinds for b in self.programs.buffers(kind))

    def _loops(self, run: Run, *others: Instruction, reverse: bool = False) -> list[Instruction]:
        """One after the other, over the rows of which the same is saved."""
        pieces = [(share, replace(run, price=price)) for share, price in shares(self.way.saves)]
        loops = [Chunks((own, *others), reverse=reverse, share=share) for share, own in pieces]
        return [*reversed(loops)] if reverse else [*loops]

    def _inputs(self, program: str, kept: tuple[Buffer, ...] = ()) -> tuple[Buffer, ...]:
        return tuple(self.programs.slots(program, bool(kept) and self.programs.reads_kept(program)).tensors)

    def _memory_of_states(self) -> list[Instruction]:
        """A state that goes from chunk to chunk begins with zeros."""
        return [Allocate(b, zero=b.by_chunk) for b in self.states]

    def _fill_states(self, kept: tuple[Buffer, ...]) -> list[Instruction]:
        """The states of all rows, before a chunk that may read any of them."""
        if not self.states:
            return []
        own = not self.programs.segment.chained
        run = Run("states", self._inputs("states", kept), writes=tuple(self.states), own=own)
        # of attention that a state is made of nothing is computed again
        filling = self._loops(run) if kept and not own else [Chunks((run,))]
        if self.in_turn:
            return [*map(Receive, self.states), *filling, *map(Send, self.states)]
        return [*filling, *map(AllGather, self.states if self.at_once else ())]

    def _memory_of_gradients(self, kind: BufferKind) -> Iterable[Instruction]:
        """Gradients of streamed inputs lie where something else did that nobody reads any more."""
        old = {b.node: b for b in self.way.overwrites if b.kind is kind}
        for position, buffer in enumerate(self.gradients):
            taken = old.get(self._partner(kind, position))
            if taken is not None:
                yield Overwrite(buffer, taken, zero=self.way.left_out)
            else:
                yield Allocate(buffer, zero=self.way.left_out and kind is BufferKind.COTANGENT)

    def _partner(self, kind: BufferKind, position: int) -> Node | None:
        if kind is BufferKind.ROWS:
            return self.gradients[position].node
        return self.cotangents[0].node if position == 0 else None
