"""What a schedule says about one segment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from torch.fx import Node

from ..cost.held_bytes import Moment
from ..cost.step import StepCost
from ..passes.cost.program import op_name
from ..passes.graph.facts import Facts, Reach, Segment, shape_of, tensors_of
from ..passes.graph.sources import path
from ..passes.s3_cut.alive_bytes import row_bytes
from ..passes.s4_trace.carried_state import find_states
from ..passes.step.procedure import Procedure
from ..passes.step.text import text

READS = {
    Reach.CONST: "nothing",
    Reach.ROW: "its own row",
    Reach.WINDOW: "a window of {window} rows",
    Reach.CAUSAL: "all rows up to its own",
    Reach.FULL: "all rows",
}


class OfStep(Protocol):
    """What a segment's figures are taken from: the schedule of the step, see `ScheduledStep`."""

    facts: Facts
    seq_len: int | None

    @property
    def cost(self) -> StepCost:
        """The cost model of the step."""

    @property
    def segments_together(self) -> list[list[Segment]]:
        """Segments whose loops run as one."""

    def timeline(self) -> list[Moment]:
        """Memory over one step, moment by moment."""


def numbers(segments: Sequence[ScheduledSegment]) -> str:
    """The numbers of segments that follow each other: "3", "1-36"."""
    first, last = segments[0].index, segments[-1].index
    return f"{first}" if first == last else f"{first}-{last}"


class ScheduledSegment:
    """A segment of a schedule; attributes of `passes.graph.facts.Segment` are its own as well.

    Args:
        schedule: the schedule.
        segment: what the passes made.
    """

    def __init__(self, schedule: OfStep, segment: Segment) -> None:
        self.schedule, self.segment = schedule, segment

    def __getattr__(self, name: str) -> Any:
        if name in ("schedule", "segment"):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.segment, name)

    @property
    def programs_key(self) -> str:
        """The same for segments that run the same programs, and for no others."""
        return self.segment.signature or str(self.segment.index)

    @property
    def inputs(self) -> list[str]:
        """What comes in: streamed values, parameters, values that are computed once; with shape and dtype."""
        segment = self.segment
        return [self._described(n) for n in (*segment.rows, *segment.constants, *segment.whole)]

    @property
    def carried_state(self) -> dict[str, int]:
        """What is kept for later chunks (keys and values, say): name and bytes a row of the batch."""
        if not self.segment.chunked or not self.segment.mixings:
            return {}
        facts = self.schedule.facts
        states = (s for s in find_states(facts, self.segment) if not s.by_chunk)
        return {s.node.name: int(row_bytes(facts, s.node)) for s in states}

    @property
    def saved(self) -> dict[str, int]:
        """What the forward keeps for the backward: name and bytes a row of the batch."""
        facts = self.schedule.facts
        together = self.schedule.segments_together
        before = next(
            (loop[k - 1] for loop in together for k, s in enumerate(loop) if s is self.segment and k), None
        )
        handed = [] if before is None else before.outputs
        found = {n.name: int(row_bytes(facts, n)) for n in self.segment.rows if n not in handed}
        if any(self.segment in loop for loop in together):
            return found | self.carried_state
        return found | self.schedule.cost.saved_of(self.segment)

    @property
    def kept(self) -> dict[str, tuple[int, Fraction]]:
        """The same, and of which share of the rows: bytes a row of the batch, and the share."""
        shares = self.schedule.cost.shares_saved(self.segment)
        return {name: (size, shares.get(name, (0, Fraction(1)))[1]) for name, size in self.saved.items()} | {
            name: kept for name, kept in shares.items() if name not in self.saved
        }

    @property
    def footprints(self) -> dict[str, str]:
        """For each op that reads along the sequence: which rows of its operands a row of it reads."""
        return {
            m.node.name: READS[m.reach].format(window=m.window or "some") for m in self.segment.mixings
        } or {"rows": READS[self.segment.reach].format(window=self.segment.window or "some")}

    @property
    def masks_in_words(self) -> str:
        """What was proved of its masks; "" if it has none."""
        masks, of = self.schedule.facts.masks, dict.fromkeys(m.mask for m in self.segment.mixings)
        return "; ".join(str(masks[m]) for m in of if m in masks)

    @property
    def op_counts(self) -> Counter[str]:
        """How often each op of the captured graph occurs."""
        return Counter(op_name(n) for n in self.segment.nodes)

    @property
    def procedures(self) -> list[Procedure]:
        """The instructions that run the segment: its forward and its backward; of a loss head that takes one
        sweep the loss, and the scaling by its gradient. None of a segment that runs unchunked."""
        return self.schedule.cost.procedures(self.segment)

    def instructions(self) -> str:
        """The same as text, an instruction a line; see "Reading a schedule" in the documentation."""
        return "\n\n".join(map(text, self.procedures)) or f"runs unchunked: {self.segment.reason}"

    @property
    def bytes(self) -> int:
        """Peak of all activations while the segment runs, in bytes, for the schedule's length."""
        return max((m.total for m in self._moments()), default=0)

    @property
    def flops(self) -> int:
        """Floating-point operations of products and attention, forward and backward, for that length."""
        return sum(m.flops for m in self._moments())

    def _moments(self) -> list[Any]:
        return [m for m in self.schedule.timeline() if m.segment == self.segment.index]

    def _described(self, node: Node) -> str:
        name = path(node) if node.op == "placeholder" else node.name
        dtype = str(tensors_of(node)[0].dtype).removeprefix("torch.")
        facts = self.schedule.facts
        names = {s: "T" if s == facts.sequence else "B" for s in facts.values}
        sizes = ", ".join(names.get(s, str(s)) for s in shape_of(node))
        return f"{name}: {dtype}[{sizes}]"

    def __repr__(self) -> str:
        return repr(self.segment)

    def __str__(self) -> str:
        lines = [repr(self.segment)]
        for title in ("inputs", "carried_state", "saved", "footprints", "op_counts"):
            lines.append(f"  {title.replace('_', ' ')}: {getattr(self, title)}")
        if self.schedule.seq_len is not None:
            lines.append(
                f"  peak while it runs: {self.bytes:,} bytes; {self.flops:,} floating-point operations"
            )
        return "\n".join(lines)
