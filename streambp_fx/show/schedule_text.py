"""A schedule as text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..cost import eager_step
from ..cost.held_bytes import CAUSES
from ..passes.graph.sources import source_line
from ..passes.s2_prove.independent_samples import batch_size
from ..passes.s3_cut.policy import Policy
from ..passes.s6_schedule.repeats import repeats
from ..units import readable, readable_work
from .collectives_text import collective_lines
from .scheduled_segment import READS, ScheduledSegment, numbers
from .scheduled_step import ScheduledStep

if TYPE_CHECKING:
    from ..passes.s6_schedule.step_parts import StepParts

NO_BREAK = "\u00a0"
# Characters of a line of the printed schedule.
LINE = 109


def schedule_text(schedule: ScheduledStep) -> str:
    """A schedule as text: a line for each segment or run of identical ones, then what holds for all."""
    lines = [
        _title(schedule),
        f"  {'segment':<9}{'kind':<10}{'ops':>4}  {'chunks':>6}  {'stores':>9}  {'state':>9}  reads",
    ]
    if schedule.unstreamed:
        lines[1:1] = textwrap.wrap(schedule.unstreamed, LINE, initial_indent="  ", subsequent_indent="    ")
    lines += [f"  {line}" for line in _segment_lines(schedule)]
    lines.append(
        f"  stored for the backward: {readable(schedule.stored_bytes_per_row())} a row of the batch"
        + _total(schedule)
    )
    again = [s for g in schedule.segments_in_groups for s in g[:-1] if schedule.policy.order == "layers"]
    for loop in schedule.segments_together:
        lines.append(
            f"  segments {loop[0].index} to {loop[-1].index}: a chunk goes through all before the next one"
        )
    for why, apart in itertools.groupby(schedule.segments_apart.items(), key=lambda found: found[1]):
        which = ", ".join(str(index) for index, _ in apart)
        lines.append(f"  segment {which}: begins behind all chunks of the one before, as {why}")
    if again:
        which = ", ".join(str(s.index) for s in again)
        what = f"segment {which} gives" if len(again) == 1 else f"segments {which} give"
        lines.append(f"  not stored but computed again: what {what}")
    if schedule.options.chooses:
        lines.append("  memory policy: chosen at the first step of a length")
    elif schedule.policy != Policy() or schedule.is_chosen("policy"):
        chosen = f"{schedule.more_memory} (chosen)" if schedule.is_chosen("policy") else ""
        lines.append(f"  memory policy: {schedule.policy}{chosen}")
    if schedule.devices > 1:
        lines.append(
            f"  rows of each sequence on {schedule.devices} devices; figures are those of one of them"
        )
    lines += _loss(schedule)
    if schedule.segments and (schedule.devices > 1 or schedule.facts.several is not None):
        lines += [f"  {line}" for line in collective_lines(schedule.for_length().timeline())]
    if schedule.check is not None:
        for line in schedule.check.lines():
            lines += textwrap.wrap(line, LINE, initial_indent="  ", subsequent_indent="    ")
    if schedule.seq_len is not None and schedule.segments:
        lines += _cost_lines(schedule)
    return "\n".join(lines)


def _cost_lines(schedule: ScheduledStep) -> Iterator[str]:
    """Kept states, peak by cause, and work, by the cost model."""
    moments, states = schedule.timeline(), schedule.kept_states_in_words()
    yield from [f"  kept besides: {states}"] if states else []
    peak = max(moments, key=lambda m: m.total)
    parts = [f"{c} {readable(peak.bytes[c])}" for c in CAUSES if peak.bytes.get(c)]
    causes = ", ".join(part.replace(" ", NO_BREAK) for part in parts)
    yield f"  peak of activations, predicted: {readable(peak.total)} in segment {peak.segment}, {peak.phase}"
    lines = textwrap.wrap(causes, width=100, initial_indent=" " * 4, subsequent_indent=" " * 4)
    yield from (line.replace(NO_BREAK, " ") for line in lines)
    work = sum(m.flops for m in moments)
    once = eager_step.flops(schedule.cost, schedule.cost.sizes(schedule.seq_len or 0))
    factor = f", {work / once:.2f} of a step that recomputes nothing" if once else ""
    yield f"  work: {readable_work(work)}{factor}"


def _title(schedule: ScheduledStep) -> str:
    length = "" if schedule.seq_len is None else f" for {schedule.seq_len} tokens"
    auto = schedule.options.chunk == "auto" or schedule.is_chosen("chunk")
    chunk = f"{schedule.options.rows}" + (" (chosen)" if auto else "")
    is_open = schedule.options.loss_chunk == "auto"
    how = "" if not is_open else " (chosen)" if schedule.chosen_loss_rows is not None else " or more"
    loss = f"{schedule.loss_rows}{how}"
    return f"Schedule of {len(schedule.segments)} segments{length}, chunk {chunk}, loss chunk {loss}"


def _segment_lines(schedule: ScheduledStep) -> Iterator[str]:
    """Identical segments folded into one line, and segments that take turns into their first round."""
    segments = schedule.segments
    for repeat in repeats([s.programs_key for s in segments]):
        every = segments[repeat.start : repeat.stop]
        if repeat.period == 1:
            yield from _lines(schedule, every)
            continue
        yield f"{numbers(every):<9}{repeat.times} times these {repeat.period}:"
        for _, run in itertools.groupby(every[: repeat.period], key=lambda s: s.programs_key):
            yield from (f" {line}" for line in _lines(schedule, list(run)))


def _lines(schedule: ScheduledStep, group: list[ScheduledSegment]) -> Iterator[str]:
    segment = group[0]
    stores = sum(segment.saved.values())
    state, chunks = schedule.state_bytes_per_row(segment), schedule.chunks(segment)
    reads = READS[segment.reach].format(window=segment.window or "some") if segment.chunked else "all rows"
    what = f"{numbers(group):<9}{segment.kind:<10}{len(segment.nodes):>4}  {chunks or '':>6}"
    masks = f" ({words})" if (words := segment.masks_in_words) else ""
    yield f"{what}  {_or_dash(stores):>9}  {_or_dash(state):>9}  {reads}{masks}"
    if not segment.chunked:
        where = f" ({source_line(segment.refused)})" if segment.refused is not None else ""
        yield from textwrap.wrap(
            f"runs unchunked: {segment.reason}{where}",
            width=LINE - 3,  # these lines are indented, by three where layers take turns
            initial_indent=" " * 9,
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _total(schedule: ScheduledStep) -> str:
    if schedule.seq_len is None:
        return ""
    return f", {readable(schedule.stored_bytes_per_row() * schedule.seq_len)} in all"


def _loss(schedule: ScheduledStep) -> Iterator[str]:
    if schedule.sweeps:
        once = "1 sweep over the loss head: its coefficients are known before it"
        twice = "2 sweeps over the loss head: its coefficients are known only after the first"
        if schedule.policy.order == "chunks":
            twice = "2 sweeps over the loss head: one with each sweep over the layers"
        yield "  " + (once if schedule.sweeps == 1 else twice)
    if schedule.sweeps == 1 and schedule.executor is not None and batch_size(schedule.facts) is not None:
        text = f"padding: {_padding(schedule.executor.parts)}"
        yield from textwrap.wrap(text, LINE, initial_indent="  ", subsequent_indent="    ")
    for position, node in schedule.facts.lazy.items():
        yield f"  output {position} ({node.name}) is {schedule.options.logits}: nothing stores it"


def _padding(parts: StepParts) -> str:
    if parts.runs_to_the_end is not None:
        return f"all rows are run, as {parts.runs_to_the_end}"
    if parts.samples_together is not None:
        return f"all samples are run as far as the longest that has a label; {parts.samples_together}"
    return "a sample is run as far as its last token that has a label"


def _or_dash(count: float) -> str:
    return readable(count) if count else "-"
