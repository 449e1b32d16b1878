"""build: the instructions of a segment's step, from what its chunk programs read and make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch.fx import Node

from ..graph.facts import Segment
from .instructions import (
    DEVICE,
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Hand,
    Instruction,
    Keep,
    Normalize,
    Over,
    Overwrite,
    Receive,
    ReduceScatter,
    Roll,
    Round,
    Run,
    Scale,
    Send,
    WriteRows,
    ZeroRows,
)
from .procedure import Procedure
from .row_chunks import chunk_size
from .saving import shares
from .way import Way


class Tensors(Protocol):
    """What goes into a program; of it the tensors, in order."""

    @property
    def tensors(self) -> Sequence[Buffer]:
        """The buffers that they are."""


class ChunkPrograms(Protocol):
    """What a segment's step is built from: what its chunk programs read and make."""

    segment: Segment
    diff_rows: list[Node]

    @property
    def in_turn(self) -> bool:
        """True if rows on several devices wait for one another."""

    def buffers(self, kind: BufferKind) -> Sequence[Buffer]:
        """All buffers of a kind."""

    def slots(self, kind: str, kept: bool = False) -> Tensors:
        """What goes into a program, what is kept of the forward among it or not."""

    def reads_kept(self, kind: str) -> bool:
        """True if a program takes what the forward has kept."""


class Builder:
    """Makes the procedures of one distinct segment.

    NOTE [rows on several devices]: what a row reads of rows on other devices is in the states, and nowhere
    else. So each device fills its own rows of a state, and all of them are gathered before the first chunk
    reads. In the backward a device differentiates its rows with what its own chunks have added to a state
    gradient; what the others have added is summed, and pulled back once more: a VJP is linear. States that
    are made of other states (chained ones, and those of recurrences) are filled by one device after the
    other, and their gradients come back in reverse.

    NOTE [rows of states on several devices]: where attention merges blocks of columns, a device need not hold
    the states of all rows: it fills its own and keeps no others. While a chunk runs, the columns of the
    others come block by block, on all devices at the same time (`s4_trace.columns_of_others`). A gradient of
    a state is added to by the chunks of all devices, and pulled back when the last of them has run.

    NOTE [chunks first]: where each chunk goes through several segments before the next chunk does, no segment
    has the rows of all chunks: rows go from one to the next, and their gradients back, a chunk at a time.
    What is kept for the backward is the states of all of them. There each chunk is run forwards once more,
    which makes its rows anew, and then backwards, from the last segment to the first.

    Args:
        programs: its chunk programs.
        way: how they are run.
    """

    def __init__(self, programs: ChunkPrograms, way: Way) -> None:
        self.programs, self.way = programs, way
        self.states = list(programs.buffers(BufferKind.STATE))
        self.outputs = [Buffer(BufferKind.OUTPUT, n) for n in programs.segment.outputs]
        self.gradients = [Buffer(BufferKind.GRADIENT, n) for n in programs.diff_rows]
        self.sums = list(programs.buffers(BufferKind.SUM))
        self.state_gradients = list(programs.buffers(BufferKind.STATE_GRADIENT))
        self.cotangents = list(programs.buffers(BufferKind.COTANGENT))
        self.kept = (Buffer(BufferKind.KEPT),) if way.saves else ()
        self.together = way.together is not None
        self.passing = frozenset() if way.together is None else way.together
        # states that are kept from the forward to the backward; the others are made again
        self.kept_states = [b for b in self.states if self.together or (way.keeps_states and b.by_chunk)]
        self.made_again = [b for b in self.states if b not in self.kept_states]
        # memory that the gradient of what comes into several segments may take, see `ChunksFirst`
        self.lent = [b for b in way.overwrites if self.together and b not in self.cotangents]
        several = way.several and bool(self.states)
        self.in_turn = several and programs.in_turn
        self.at_once = several and not self.in_turn
        self.by_blocks = self.at_once and way.by_blocks
        self.size = chunk_size(programs.segment, self.together)

    def forward(self) -> Procedure:
        """The outputs, and what is kept of each chunk."""
        held = [b for b in self.outputs if b not in self.passing]
        body: list[Instruction] = [self._allocate(b, zero=self.way.left_out) for b in held]
        body += self._memory_of_states(self.states)
        filled, received = self.way.full or self.at_once, self.states if self.in_turn else ()
        body += self._fill_states("states", ()) if filled else map(Receive, received)
        run = Run(
            "forward",
            self._inputs("forward"),
            results=(*self.outputs, *self.kept),
            writes=() if filled else tuple(self.states),
            by_blocks=self.by_blocks,
        )
        body += self._loops(run, *map(self._put, self.outputs), *map(Keep, self.kept))
        body += map(Send, self.states if self.in_turn else ())
        body += map(Free, self.made_again)
        made = (*held, *self.kept, *self.kept_states)
        return self._procedure("forward", self._given(), body, made)

    def again(self) -> Procedure:
        """A forward of each chunk just before its backward: the states are there, the rows are made anew."""
        run = Run(
            "forward",
            self._inputs("forward"),
            results=(*self.outputs, *self.kept),
            rewrites=tuple(self.states),
        )
        body = self._loops(run, *map(Hand, self.outputs), *map(Keep, self.kept))
        return self._procedure("again", (*self._given(), *self.states), body, (), *self.outputs, *self.kept)

    def backward(self) -> Procedure:
        """Gradients of the streamed inputs, and of the constants."""
        body: list[Instruction] = [*self._memory_of_states(self.made_again)]
        if self.made_again:
            body += self._fill_states("columns" if self.kept_states else "states", self.kept)
        rolled = self._rolled
        of_states = [b for b in self.state_gradients if b not in rolled]
        body += [Allocate(b, zero=True, own=self.by_blocks) for b in of_states]
        body += [Allocate(b, zero=True) for b in self.sums]
        body += self._memory_of_gradients(BufferKind.COTANGENT)
        joint = Run(
            "joint",
            self._inputs("joint", self.kept),
            results=tuple(self.gradients),
            adds=(*self.state_gradients, *self.sums),
            finishes=() if self.way.full or self.by_blocks else tuple(self.state_gradients),
            by_blocks=self.by_blocks,
        )
        in_turn = self.state_gradients if self.in_turn else ()
        body += map(Receive, in_turn)
        body += self._loops(joint, *map(self._put, self.gradients), reverse=True, before=map(Roll, rolled))
        body += map(Send, in_turn)
        if self.at_once and not self.by_blocks:
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
            body.append(Chunks((last, *rows), size=self.size))
        body += map(Free, (*self.made_again, *self.state_gradients))
        body += map(Round, self.sums)
        held = [b for b in self.gradients if b not in self.passing]
        given = [b for b in (*self.cotangents, *self.lent) if b not in self.passing]
        if self.together:
            of_chunk = (*self.cotangents, *self.gradients, *self.kept)
            passing = [b for b in of_chunk if b in self.passing or b in self.kept]
            given += [*self._given(), *self.kept_states]
            return self._procedure("backward", given, body, (*held, *self.sums), *passing)
        given += [*self._given(), *self.kept, *self.kept_states]
        return self._procedure("backward", given, body, (*held, *self.sums))

    def loss(self) -> Procedure:
        """Values by rows, and all gradients for a unit gradient of the loss: the cotangents are its own."""
        body: list[Instruction] = [Allocate(b, zero=True) for b in self.outputs]
        body += map(Normalize, self.cotangents if self.way.half else ())
        body += [Allocate(b, zero=True) for b in self.sums]
        body += self._memory_of_gradients(BufferKind.ROWS)
        results = (*self.outputs, *self.gradients)
        run = Run("loss", self._inputs("loss"), results, adds=tuple(self.sums))
        body.append(Chunks((run, *map(WriteRows, results)), over=Over.COUNTED, size=self.size))
        if self.gradients:
            zeros = tuple(map(ZeroRows, self.gradients))
            body.append(Chunks(zeros, over=Over.NOT_COUNTED, size=self.size))
        given = (*self.cotangents, *self._given())
        return Procedure("loss", given, tuple(body), (*results, *self.sums), self.way.several)

    def scaling(self) -> Procedure:
        """What the backward of a loss has left to do, once the gradient of the loss is known."""
        made = (*self.gradients, *self.sums)
        return Procedure("scaling", made, (*map(Scale, made), *map(Round, self.sums)), made, self.way.several)

    # ---- parts

    def _place(self, buffer: Buffer) -> str:
        return self.way.place if buffer in self.way.elsewhere else DEVICE

    def _allocate(self, buffer: Buffer, zero: bool) -> Allocate:
        return Allocate(buffer, zero, self._place(buffer))

    def _given(self) -> tuple[Buffer, ...]:
        kinds = (BufferKind.ROWS, BufferKind.CONSTANT, BufferKind.WHOLE)
        every = (b for kind in kinds for b in self.programs.buffers(kind))
        return tuple(b for b in every if b not in self.passing)

    def _procedure(
        self,
        name: str,
        given: Iterable[Buffer],
        body: Iterable[Instruction],
        results: Iterable[Buffer],
        *passing: Buffer,
    ) -> Procedure:
        rows = (b for b in self.programs.buffers(BufferKind.ROWS) if b in self.passing)
        outputs = (b for b in self.outputs if b in self.passing and name == "forward")
        handed = tuple(dict.fromkeys((*rows, *outputs, *passing)))
        return Procedure(name, tuple(given), tuple(body), tuple(results), self.way.several, handed)

    def _put(self, buffer: Buffer) -> Instruction:
        """The chunk's rows of a result, where they belong."""
        return Hand(buffer) if buffer in self.passing else WriteRows(buffer)

    @property
    def _rolled(self) -> list[Buffer]:
        """State gradients of which no more is held than a chunk reads, since a window bounds that."""
        window = self.together and self.programs.segment.window is not None
        return [b for b in self.state_gradients if window and not b.by_chunk]

    def _loops(
        self, run: Run, *others: Instruction, reverse: bool = False, before: Iterable[Instruction] = ()
    ) -> list[Instruction]:
        """One after the other, over the rows of which the same is saved."""
        first = tuple(before)
        pieces = [(share, replace(run, price=price)) for share, price in shares(self.way.saves)]
        bodies = ((share, (*first, own, *others)) for share, own in pieces)
        loops = [Chunks(body, reverse=reverse, share=share, size=self.size) for share, body in bodies]
        return [*reversed(loops)] if reverse else [*loops]

    def _inputs(self, program: str, kept: tuple[Buffer, ...] = ()) -> tuple[Buffer, ...]:
        return tuple(self.programs.slots(program, bool(kept) and self.programs.reads_kept(program)).tensors)

    def _memory_of_states(self, states: list[Buffer]) -> list[Instruction]:
        """A state that goes from chunk to chunk begins with zeros."""
        return [Allocate(b, zero=b.by_chunk, own=self.by_blocks) for b in states]

    def _fill_states(self, program: str, kept: tuple[Buffer, ...]) -> list[Instruction]:
        """The states of all rows, before a chunk that may read any of them; not those that were kept."""
        if not self.states:
            return []
        own = not self.programs.segment.chained
        filled = self.made_again if program == "columns" else self.states
        run = Run(program, self._inputs(program, kept), writes=tuple(filled), own=own)
        # of attention that a state is made of nothing is computed again
        filling = self._loops(run) if kept and not own else [Chunks((run,), size=self.size)]
        if self.in_turn:
            return [*map(Receive, self.states), *filling, *map(Send, self.states)]
        return [*filling, *map(AllGather, self.states if self.at_once and not self.by_blocks else ())]

    def _memory_of_gradients(self, kind: BufferKind) -> Iterable[Instruction]:
        """Gradients of streamed inputs lie where something else did that nobody reads any more."""
        old = {b.node: b for b in self.way.overwrites if b.kind is kind}
        for position, buffer in enumerate(self.gradients):
            if buffer in self.passing:
                continue
            taken = old.get(self._partner(kind, position)) if position == 0 or not self.lent else None
            if taken is not None and self._place(taken) == self._place(buffer):
                yield Overwrite(buffer, taken, zero=self.way.left_out, place=self._place(buffer))
            else:
                yield self._allocate(buffer, zero=self.way.left_out and kind is BufferKind.COTANGENT)

    def _partner(self, kind: BufferKind, position: int) -> Node | None:
        if self.lent:
            return self.lent[0].node
        if kind is BufferKind.ROWS:
            return self.gradients[position].node
        return self.cotangents[0].node if position == 0 else None
