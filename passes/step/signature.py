"""signature: what the programs of a segment read and make, and with them its procedures.

It is made of the programs and the way in which they are run, and of no procedure: the checker compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .instructions import Buffer, BufferKind, Chunks, Run
from .row_chunks import ChunkSize
from .saving import Price, shares
from .way import Way

Buffers = tuple[Buffer, ...]
KEPT = Buffer(BufferKind.KEPT)
#: The programs that a procedure may call in some way of running it.
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward", "states"),
    "again": ("forward",),
    "backward": ("states", "columns", "joint", "state_joint"),
    "loss": ("loss",),
    "scaling": (),
}


@dataclass(frozen=True)
class Interface:
    """What a procedure is given and hands over, in order, and what of it goes a chunk at a time."""

    parameters: Buffers
    results: Buffers
    passing: frozenset[Buffer] = frozenset()


@dataclass(frozen=True)
class Signature:
    """What a segment's programs read and make, in one way of running them.

    Attributes:
        way: that.
        buffers: of each kind, but for what is kept.
        slots: what goes into a program, by its kind: without what is kept, and with it.
        reads_kept: programs that take what is kept.
        chained: some state is made of another state.
        in_turn: one of several devices waits for the other.
        size: how many rows its chunks have at most.
    """

    way: Way
    buffers: Mapping[BufferKind, Buffers]
    slots: Mapping[str, tuple[Buffers, Buffers]]
    reads_kept: frozenset[str]
    chained: bool
    in_turn: bool
    size: ChunkSize = ChunkSize.LAYER

    def knows(self, buffer: Buffer) -> bool:
        """True if the segment has such a buffer."""
        return buffer == KEPT or buffer in self.buffers[buffer.kind]

    @property
    def kept(self) -> Buffers:
        """What is kept of the chunks."""
        return (KEPT,) if self.way.saves else ()

    @property
    def kept_states(self) -> Buffers:
        """States that go from the forward to the backward."""
        together, way = self.way.together is not None, self.way
        states = self.buffers[BufferKind.STATE]
        return tuple(b for b in states if together or (way.keeps_states and b.by_chunk))

    @property
    def are_filled_first(self) -> bool:
        """True if the states of all rows are there before the first chunk reads."""
        return self.way.full or (self.way.several and not self.in_turn)

    @property
    def holds_own_states(self) -> bool:
        """True if a device holds the states of its own rows alone."""
        return self.way.by_blocks and self.way.several and not self.in_turn

    # ---- a procedure

    def interface(self, name: str) -> Interface:
        """What a procedure is given and hands over."""
        of, together = self.buffers, self.way.together or frozenset()
        every = (*of[BufferKind.ROWS], *of[BufferKind.CONSTANT], *of[BufferKind.WHOLE])
        given = tuple(b for b in every if b not in together)
        outputs, sums = of[BufferKind.OUTPUT], of[BufferKind.SUM]
        gradients, cotangents = of[BufferKind.GRADIENT], of[BufferKind.COTANGENT]
        rows = [b for b in of[BufferKind.ROWS] if b in together]
        if name == "loss":
            return Interface((*cotangents, *given), (*outputs, *gradients, *sums))
        if name == "scaling":
            return Interface((*gradients, *sums), (*gradients, *sums))
        if name == "again":
            passing = frozenset((*rows, *outputs, *self.kept))
            return Interface((*given, *of[BufferKind.STATE]), (), passing)
        if name == "forward":
            held = tuple(b for b in outputs if b not in together)
            passing = frozenset((*rows, *(b for b in outputs if b in together)))
            return Interface(given, (*held, *self.kept, *self.kept_states), passing)
        return self._of_backward(given, rows)

    def _of_backward(self, given: Buffers, rows: list[Buffer]) -> Interface:
        of, together = self.buffers, self.way.together
        gradients, cotangents = of[BufferKind.GRADIENT], of[BufferKind.COTANGENT]
        if together is None:
            parameters = (*cotangents, *given, *self.kept, *self.kept_states)
            return Interface(parameters, (*gradients, *of[BufferKind.SUM]))
        lent = (b for b in self.way.overwrites if b not in cotangents)
        read = (b for b in (*cotangents, *lent) if b not in together)
        made = (b for b in gradients if b not in together)
        passing = (b for b in (*cotangents, *gradients) if b in together)
        return Interface(
            (*read, *given, *self.kept_states),
            (*made, *of[BufferKind.SUM]),
            frozenset((*rows, *passing, *self.kept)),
        )

    # ---- a program

    def run(self, procedure: str, program: str) -> Run:
        """How a procedure calls a program, whatever is saved."""
        of, kept = self.buffers, self.takes_kept(procedure, program)
        states, of_states = of[BufferKind.STATE], of[BufferKind.STATE_GRADIENT]
        outputs, gradients, sums = of[BufferKind.OUTPUT], of[BufferKind.GRADIENT], of[BufferKind.SUM]
        again, backward = procedure == "again", program in ("joint", "state_joint")
        results = {"forward": (*outputs, *self.kept), "loss": (*outputs, *gradients)}
        adds = {"joint": (*of_states, *sums), "state_joint": sums, "loss": sums}
        made_again = tuple(b for b in states if b not in self.kept_states)
        first = again or self.are_filled_first
        writes = {"states": states, "columns": made_again, "forward": () if first else states}
        by_blocks = self.holds_own_states and program in ("forward", "joint")
        finishes = {"joint": () if self.way.full or by_blocks else of_states, "state_joint": of_states}
        fills = program in ("states", "columns")
        return Run(
            program,
            self.slots[program][kept],
            results.get(program, gradients if backward else ()),
            writes.get(program, ()),
            adds.get(program, ()),
            finishes.get(program, ()),
            own=program == "state_joint" or (fills and not self.chained),
            by_blocks=by_blocks,
            rewrites=states if again else (),
        )

    def programs(self, procedure: str) -> tuple[str, ...]:
        """The programs that a procedure may call. States that are kept are not made again."""
        unused = "states" if procedure == "backward" and self.kept_states else "columns"
        return tuple(p for p in PROGRAMS[procedure] if p != unused)

    def takes_kept(self, procedure: str, program: str) -> bool:
        """True if a program goes on from what the forward has kept."""
        return bool(self.kept) and procedure == "backward" and program in self.reads_kept

    def price(self, procedure: str, loop: Chunks, run: Run) -> Price | None:
        """At which price values of these rows are saved, or were.

        Raises:
            KeyError: not one is that of all of these rows.
        """
        saved = run.program == "forward" or self.takes_kept(procedure, run.program)
        return dict(shares(self.way.saves))[loop.share] if saved and self.kept else None
