"""What the compiler decided for one captured graph, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ..cost.held_bytes import Moment
from ..cost.step import StepCost
from ..options import Options
from ..passes.graph.facts import Facts, Segment
from ..passes.s3_cut.alive_bytes import row_bytes
from ..passes.s3_cut.policy import Policy, rows_from_outside
from ..passes.s3_cut.segment import sequences
from ..passes.s6_schedule import build
from ..passes.s6_schedule.chunks_first import why_apart
from ..passes.s6_schedule.program import flat, segment_of, unrolled
from ..passes.s6_schedule.program.values import CHUNK, LOSS_CHUNK
from ..units import readable
from .scheduled_segment import ScheduledSegment

if TYPE_CHECKING:
    from ..auto_executor import AutoExecutor
    from ..checking.result import SelfCheck
    from ..runtime.executor import Executor

Self = TypeVar("Self", bound="ScheduledStep")


@dataclass
class ScheduledStep:
    """What the compiler decided for one captured graph, and the figures that follow; the attributes are
    those of `Schedule`.
    """

    facts: Facts = field(repr=False)
    options: Options
    seq_len: int | None = None
    sweeps: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    given: Options | None = None
    chosen_loss_rows: int | None = None
    more_memory: str = field(default="", repr=False, compare=False)
    executor: Executor | AutoExecutor | None = field(default=None, repr=False, compare=False)
    check: SelfCheck | None = None
    unstreamed: str = ""
    _cost: StepCost | None = field(default=None, repr=False, compare=False)
    _peak: tuple | None = field(default=None, repr=False, compare=False)
    _timeline: tuple | None = field(default=None, repr=False, compare=False)
    _memory: object = field(default=None, repr=False, compare=False)

    def choose(self, options: Options, loss_rows: int, more: str = "") -> None:
        """Note what was chosen for the last new length; `loss_rows` of the loss head are in a chunk of it.

        `more` is what more memory would buy, in words, where the policy does not say it.
        """
        self.given = self.given or self.options
        self.options, self.chosen_loss_rows, self.more_memory = options, loss_rows, more

    def is_chosen(self, option: str) -> bool:
        """True if an option that was left open has been chosen since."""
        if self.given is None:
            return False
        return self.given.chooses if option == "policy" else getattr(self.given, option) == "auto"

    @property
    def segments(self) -> list[ScheduledSegment]:
        """The segments in the order in which they run."""
        return [ScheduledSegment(self, s) for s in self.facts.segments]

    # ---- cost

    @property
    def cost(self) -> StepCost:
        """The cost model of the step. The first use traces the programs, which takes some seconds."""
        if self._cost is None or self._cost.options != self.options:
            executor = None if self.executor is None else self.executor.storing(self.policy)
            alone = StepCost(self.facts, self.options, executor)
            self._cost = alone if self.devices == 1 else alone.along(self.devices)
        return self._cost

    @property
    def devices(self) -> int:
        """How many devices have rows of each sequence."""
        return 1 if self.options.mesh is None else self.options.mesh.size()

    def peak_of_steps(self) -> tuple[int, int] | None:
        """Peak activation bytes, by the cost model, and rows of a chunk: of the largest step that was run.

        None if there was no step. For a new largest step the programs are walked once, which takes a moment.
        """
        largest = self.executor.largest if self.executor is not None else None
        if largest is None:
            return None
        if self._peak is None or self._peak[0] != largest:
            tokens, rows, others = largest
            peak = int(self.cost.peak(self.cost.sizes(tokens, rows, dict(others))).total)
            before = (0, 0) if self._peak is None else self._peak[1]
            self._peak = (largest, max(before, (peak, rows)))
        return self._peak[1]

    def timeline(self) -> list[Moment]:
        """Memory over one step, moment by moment, in bytes by cause; for the schedule's length.

        Raises:
            ValueError: the schedule has no length yet: see `for_length`.
        """
        if self.seq_len is None:
            raise ValueError("the schedule is for no certain length: use schedule.for_length(tokens)")
        key = (self.seq_len, self.options)
        if self._timeline is None or self._timeline[0] != key:
            self._timeline = (key, self.cost.timeline(self.cost.sizes(self.seq_len)))
        return self._timeline[1]

    # ---- bytes

    @property
    def loss_rows(self) -> int:
        """Rows of a chunk of the loss head, as chosen, or for the batch size with which it was captured."""
        return self.chosen_loss_rows or self.options.loss_rows(
            int(sequences(self.facts).subs(self.facts.values))
        )

    def stored_bytes_per_row(self) -> int:
        """Bytes that the forward keeps for the backward, a row of the batch.

        They are the inputs of the segments, each once, or what the memory policy makes of that.
        """
        kept: dict[str, int] = {}
        if self.policy.order == "chunks":
            return sum({k: v for s in self.segments for k, v in s.saved.items()}.values())
        for group in self.segments_in_groups:
            if len(group) == 1:
                kept |= ScheduledSegment(self, group[0]).saved
            else:
                kept |= {n.name: int(row_bytes(self.facts, n)) for n in rows_from_outside(group)}
        return sum(kept.values())

    def kept_states_in_words(self) -> str:
        """What is kept of recurrences for the backward, in words; "" if nothing is.

        For the schedule's length; by default a state is made again.
        """
        if self.seq_len is None:
            return ""
        found = self.cost.bytes_of_kept_states(self.cost.sizes(self.seq_len))
        of = f"segment {min(found)}" if len(found) == 1 else f"{len(found)} segments"
        return f"states of recurrences of {of}, {readable(sum(found.values()))}" if found else ""

    @property
    def segments_in_groups(self) -> list[list[Segment]]:
        """The segments in order; in one list those of a `Group` or of `ChunksFirst`."""
        if not self.segments:
            return []
        forward = unrolled(self.cost.step_program.forward)
        found = ([k for k in map(segment_of, flat([i])) if k is not None] for i in forward)
        return [[self.facts.segments[k] for k in own] for own in found if own]

    @property
    def segments_together(self) -> list[list[Segment]]:
        """Segments whose loops run as one: each chunk goes through all of them before the next one does."""
        found = [] if self.policy.order == "layers" else self.segments_in_groups
        return [group for group in found if len(group) > 1]

    @property
    def segments_apart(self) -> dict[int, str]:
        """With chunks first: segments that begin anew behind all chunks of the one before, and why."""
        if self.policy.order == "layers":
            return {}
        executor = self.cost.executor
        program = build.schedule(executor.parts, executor.segments_where(self.cost.is_full), True)
        return why_apart(program, executor.parts)

    @property
    def policy(self) -> Policy:
        """What is kept for the backward, and where."""
        return self.options.stored

    def state_bytes_per_row(self, segment: ScheduledSegment) -> int:
        """Bytes of the carried state of a segment, a row of the batch (keys and values, say).

        They are held while the segment runs; in backward their gradients as well.
        """
        return sum(segment.carried_state.values())

    def chunks(self, segment: ScheduledSegment) -> int | None:
        """How many chunks a segment runs in, if the sequence length is known."""
        if self.seq_len is None or not segment.chunked or segment.kind == "unchunked":
            return None if self.seq_len is None else 1
        calls = (c for c in self.cost.step_program.calls() if c.segment == segment.index)
        sizes = {self.facts.sequence: self.seq_len, CHUNK: self.options.rows, LOSS_CHUNK: self.loss_rows}
        return int(next(calls).chunks.subs(sizes))

    def for_length(self: Self, seq_len: int | None = None) -> Self:
        """The same schedule for a sequence length: by default that of the call that was captured."""
        known = self.facts.values.get(self.facts.sequence) if self.facts.sequence is not None else None
        length = seq_len or self.seq_len or known
        return dataclasses.replace(self, seq_len=length, _timeline=None)
