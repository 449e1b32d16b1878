"""The schedule of a compiled graph, for people to read."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .checking.result import SelfCheck
from .cost import StepCost
from .files import check_writable, write_whole
from .folding import repeats
from .ledger import CAUSES, Moment
from .options import Options
from .passes.batch import batch_size
from .passes.capture import source_line
from .passes.ir import Facts
from .passes.policy import Policy, groups, rows_from_outside
from .passes.segment import row_bytes, samples
from .segments import READS, ScheduledSegment
from .units import readable, readable_work

NO_BREAK = "\u00a0"
# Characters of a line of the printed schedule.
LINE = 109

if TYPE_CHECKING:
    from .auto import AutoExecutor
    from .memory import StepMemory
    from .runtime.executor import Executor
    from .runtime.padding import Padding


@dataclass
class Schedule:
    """What the compiler decided for one captured graph.

    Attributes:
        facts: what was proved; `segments` are in order of execution.
        options: the options it was compiled with.
        seq_len: tokens of a sequence, where the schedule was made for a certain length; else None.
        sweeps: over the loss head in a training step: 1 if its gradient comes with the loss, 2 if the loss
            must be known first, 0 if there is no loss.
        given: the options as they were given; `options` has what the compiler has chosen instead of "auto".
        chosen_loss_rows: rows of a chunk of the loss head, as chosen for the last new length; None: not yet.
        number: schedules are counted in the order in which they are made.
        executor: what runs it, if it was compiled to be run.
        check: what the self-check before its first use has found; None: there was none yet.
    """

    facts: Facts = field(repr=False)
    options: Options
    seq_len: int | None = None
    sweeps: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    given: Options | None = None
    chosen_loss_rows: int | None = None
    executor: Executor | AutoExecutor | None = field(default=None, repr=False, compare=False)
    check: SelfCheck | None = None
    _cost: StepCost | None = field(default=None, repr=False, compare=False)
    _peak: tuple | None = field(default=None, repr=False, compare=False)
    _timeline: tuple | None = field(default=None, repr=False, compare=False)
    _code: str | None = field(default=None, repr=False, compare=False)
    _memory: StepMemory | None = field(default=None, repr=False, compare=False)

    def choose(self, options: Options, loss_rows: int) -> None:
        """Note what was chosen for the last new length.

        Args:
            options: those that were chosen.
            loss_rows: rows of the loss head in a chunk of it.
        """
        self.given = self.given or self.options
        self.options, self.chosen_loss_rows = options, loss_rows

    def is_chosen(self, option: str) -> bool:
        """True if an option that was left open has been chosen since."""
        return self.given is not None and getattr(self.given, option) == "auto"

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
            self._cost = StepCost(self.facts, self.options, executor)
        return self._cost

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
            int(samples(self.facts).subs(self.facts.values))
        )

    def stored_bytes_per_row(self) -> int:
        """Bytes that the forward keeps for the backward, a row of the batch.

        They are the inputs of the segments, each once, or what the memory policy makes of that.
        """
        kept: dict[str, int] = {}
        for group in groups(self.facts, self.policy):
            if len(group) == 1:
                kept |= ScheduledSegment(self, group[0]).saved
            else:
                kept |= {n.name: int(row_bytes(self.facts, n)) for n in rows_from_outside(group)}
        return sum(kept.values())

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
        if self.seq_len is None or not segment.chunked or segment.kind == "whole":
            return None if self.seq_len is None else 1
        rows = self.options.rows if segment.mixings else self.loss_rows
        return -(-(self.seq_len - segment.removed) // rows)

    def for_length(self, seq_len: int | None = None) -> Schedule:
        """The same schedule for a sequence length: by default that of the call that was captured."""
        known = self.facts.values.get(self.facts.sequence) if self.facts.sequence is not None else None
        length = seq_len or self.seq_len or known
        return dataclasses.replace(self, seq_len=length, _code=None, _timeline=None)

    # ---- the program

    def code(self) -> str:
        """The compiled step as one Python module that runs, forward and backward, and needs only PyTorch.

        Each op has a line with its shape, under the line of the model that it comes from. `exec` the text and
        call `step(inputs..., parameters)`, where `parameters` is a dict by dotted name; it returns the loss
        and a dict of gradients. It is printed for `seq_len`, or where that is None for the length of the call
        that was captured. It serves other lengths whose chunks are alike, and raises for those whose chunks
        are not. The programs are traced at the first call, which takes some seconds.

        Raises:
            CompileError: a program cannot be traced.
            ValueError: the graph has nothing that is streamed.
        """
        from .code import generate

        if not self.segments:
            raise ValueError("the graph runs unstreamed: there is no program to print")
        if self._code is None:
            self._code = generate(self.facts, self.options, self.seq_len)
        return self._code

    def to_dot(self) -> str:
        """The segment graph as Graphviz text: `dot -Tsvg` draws it.

        Segments are boxes, dashed with their reason where they run whole; edges are what flows between them,
        with bytes a row of the batch; a carried state is an edge of a segment to itself.
        """
        from .dot import dot

        return dot(self)

    def to_html(self, path: str | Path, title: str | None = None) -> None:
        """Write the schedule as one page of HTML that needs no network and no other file.

        It shows the graph of segments with their programs, which rows of the input each value reads, the
        memory of the step over time by cause, and what was not chunked.

        Args:
            path: the file; it is written whole or not at all.
            title: what it is the schedule of, a model's name say.

        Raises:
            OutputError: the file cannot be written.
            CompileError: a program cannot be traced.
            ValueError: the graph has nothing that is streamed.
        """
        from .page import page

        check_writable(path)
        write_whole(path, page(self, title).encode())

    def plot_memory(self, path: str | Path, title: str | None = None) -> None:
        """Draw the memory of the step, eager, with gradient checkpointing and streamed.

        The left panel is one step over time, the right one the peak against the sequence length. Needs
        matplotlib: `pip install "streambp-fx[plot]"`.

        Args:
            path: a file that ends in .png, .svg or .pdf; it is written whole or not at all.
            title: what it is the memory of, a model's name say.

        Raises:
            OutputError: matplotlib is missing, the format is unknown, or the file cannot be written.
            ValueError: the graph has nothing that is streamed.
        """
        from .plots import plot_memory

        plot_memory(self, path, title)

    # ---- text

    def __str__(self) -> str:
        lines = [
            self._title(),
            f"  {'segment':<9}{'kind':<9}{'ops':>4}  {'chunks':>6}  {'stores':>9}  {'state':>9}  reads",
        ]
        lines += [f"  {line}" for line in self._segment_lines()]
        lines.append(
            f"  stored for the backward: {readable(self.stored_bytes_per_row())} a row of the batch"
            + self._total()
        )
        again = [s for g in groups(self.facts, self.policy) for s in g[:-1]]
        if again:
            numbers = ", ".join(str(s.index) for s in again)
            what = f"segment {numbers} gives" if len(again) == 1 else f"segments {numbers} give"
            lines.append(f"  not stored but computed again: what {what}")
        if self.options.policy == "auto":
            lines.append("  memory policy: chosen at the first step of a length")
        elif self.policy != Policy() or self.is_chosen("policy"):
            lines.append(f"  memory policy: {self.policy}{' (chosen)' if self.is_chosen('policy') else ''}")
        lines += self._loss()
        if self.check is not None:
            for line in self.check.lines():
                lines += textwrap.wrap(line, LINE, initial_indent="  ", subsequent_indent="    ")
        if self.seq_len is not None and self.segments:
            lines += self._cost_lines()
        return "\n".join(lines)

    def _cost_lines(self) -> Iterator[str]:
        """Peak by cause and work, by the cost model."""
        from . import unstreamed

        moments = self.timeline()
        peak = max(moments, key=lambda m: m.total)
        parts = [f"{c} {readable(peak.bytes[c])}" for c in CAUSES if peak.bytes.get(c)]
        causes = ", ".join(part.replace(" ", NO_BREAK) for part in parts)
        yield f"  peak of activations: {readable(peak.total)} in segment {peak.segment}, {peak.phase}"
        lines = textwrap.wrap(causes, width=100, initial_indent=" " * 4, subsequent_indent=" " * 4)
        yield from (line.replace(NO_BREAK, " ") for line in lines)
        work = sum(m.flops for m in moments)
        once = unstreamed.flops(self.cost, self.cost.sizes(self.seq_len or 0))
        factor = f", {work / once:.2f} of a step that recomputes nothing" if once else ""
        yield f"  work: {readable_work(work)}{factor}"

    def _title(self) -> str:
        length = "" if self.seq_len is None else f" for {self.seq_len} tokens"
        auto = self.options.chunk == "auto" or self.is_chosen("chunk")
        chunk = f"{self.options.rows}" + (" (chosen)" if auto else "")
        is_open = self.options.loss_chunk == "auto"
        how = "" if not is_open else " (chosen)" if self.chosen_loss_rows is not None else " or more"
        loss = f"{self.loss_rows}{how}"
        return f"Schedule of {len(self.segments)} segments{length}, chunk {chunk}, loss chunk {loss}"

    def _segment_lines(self) -> Iterator[str]:
        """Identical segments folded into one line, and segments that take turns into their first round."""
        segments = self.segments
        for repeat in repeats([s.programs_key for s in segments]):
            every = segments[repeat.start : repeat.stop]
            if repeat.period == 1:
                yield from self._lines(every)
                continue
            numbers = f"{every[0].index}-{every[-1].index}"
            yield f"{numbers:<9}{repeat.times} times these {repeat.period}:"
            for _, run in itertools.groupby(every[: repeat.period], key=lambda s: s.programs_key):
                yield from (f" {line}" for line in self._lines(list(run)))

    def _lines(self, group: list[ScheduledSegment]) -> Iterator[str]:
        segment, last = group[0], group[-1]
        numbers = f"{segment.index}" if last is segment else f"{segment.index}-{last.index}"
        stores = sum(segment.saved.values())
        state, chunks = self.state_bytes_per_row(segment), self.chunks(segment)
        reads = (
            READS[segment.reach].format(window=segment.window or "some") if segment.chunked else "all rows"
        )
        what = f"{numbers:<9}{segment.kind:<9}{len(segment.nodes):>4}  {chunks or '':>6}"
        yield f"{what}  {_or_dash(stores):>9}  {_or_dash(state):>9}  {reads}{self._masks(segment)}"
        if not segment.chunked:
            where = f" ({source_line(segment.refused)})" if segment.refused is not None else ""
            yield from textwrap.wrap(
                f"runs whole: {segment.reason}{where}",
                width=LINE - 3,  # these lines are indented, by three where layers take turns
                initial_indent=" " * 9,
                subsequent_indent=" " * 11,
                break_long_words=False,
                break_on_hyphens=False,
            )

    def _masks(self, segment: ScheduledSegment) -> str:
        masks = dict.fromkeys(m.mask for m in segment.mixings if m.mask is not None)
        described = "; ".join(str(self.facts.masks[m]) for m in masks if m in self.facts.masks)
        return f" ({described})" if described else ""

    def _total(self) -> str:
        if self.seq_len is None:
            return ""
        return f", {readable(self.stored_bytes_per_row() * self.seq_len)} in all"

    def _loss(self) -> Iterator[str]:
        if self.sweeps:
            once = "1 sweep over the loss head: its coefficients are known before it"
            twice = "2 sweeps over the loss head: its coefficients are known only after the first"
            yield "  " + (once if self.sweeps == 1 else twice)
        if self.sweeps == 1 and self.executor is not None and batch_size(self.facts) is not None:
            text = f"padding: {_padding(self.executor.padding)}"
            yield from textwrap.wrap(text, LINE, initial_indent="  ", subsequent_indent="    ")
        for position, node in self.facts.lazy.items():
            yield f"  output {position} ({node.name}) is {self.options.logits}: nothing stores it"


def _padding(padding: Padding) -> str:
    if padding.runs_to_the_end is not None:
        return f"all rows are run, as {padding.runs_to_the_end}"
    if padding.samples_together is not None:
        return f"all samples are run as far as the longest that has a label; {padding.samples_together}"
    return "a sample is run as far as its last token that has a label"


def _or_dash(count: float) -> str:
    return readable(count) if count else "-"
