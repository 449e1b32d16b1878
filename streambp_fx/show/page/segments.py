"""The segments: what they hold, what their values read, their programs; and what is not chunked."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...passes.graph.printing import place
from ...passes.graph.sources import source_line
from ...passes.s3_cut.alive_bytes import row_bytes
from ...units import readable
from ..scheduled_segment import ScheduledSegment
from ..step_memory import StepMemory
from .dependencies import dependences_html
from .graph import Group, reads
from .programs import Function, function_html

#: Of the table of what is not chunked.
HEADS = ("segment", "why", "op", "line of the model", "largest total while it runs")


def segments_html(memory: StepMemory, groups: list[Group], code: list[Function]) -> str:
    """One element that opens for each run of identical segments."""
    return "".join(_group(memory, group, code) for group in groups)


def _group(memory: StepMemory, group: Group, code: list[Function]) -> str:
    segment = group.first
    own = [f for f in code if f.segment == segment.index]
    if own:
        programs = "".join(map(function_html, own))
    elif group.twin != segment.index:
        programs = (
            f'<p>The programs of <a href="#segment-{group.twin}">segment {group.twin}</a> run here too.</p>'
        )
    else:
        programs = "<p>Part of the step.</p>"
    same = " They are identical and share one set of programs." if len(group.segments) > 1 else ""
    dependences = dependences_html(memory.schedule.facts, segment.segment)
    ops = f"{len(segment.nodes)} op{'' if len(segment.nodes) == 1 else 's'}"
    summary = f"{segment.kind}, {ops}, reads {reads(segment)}"
    return (
        f'<details class="segment" id="segment-{segment.index}" data-print><summary><b>{group.title}</b> '
        f'<span class="muted">{escape(summary)}</span></summary>'
        f'<p>{_about(segment)}{same}</p><dl class="facts">{"".join(_facts(memory, group))}</dl>'
        f"<h4>Which rows of the input each value reads</h4>{dependences}"
        f"<h4>Programs</h4>{programs}</details>"
    )


def _about(segment: ScheduledSegment) -> str:
    if not segment.chunked:
        where = "" if segment.refused is None else f" (<code>{escape(place(segment.refused))}</code>)"
        return f"Runs whole, recomputed in the backward: {escape(segment.reason or '')}{where}."
    if segment.kind == "unchunked":
        return "Runs whole: it computes next to nothing."
    kind = "with a carried state" if segment.mixings else "row by row"
    return f"Runs chunk by chunk, {kind}."


def _facts(memory: StepMemory, group: Group) -> Iterator[str]:
    schedule, segment = memory.schedule, group.first
    stores = sum(int(row_bytes(schedule.facts, n)) for n in segment.rows)
    yield _fact("chunks", "chunks", schedule.chunks(segment) or 0)
    yield _fact("stores", "stored input, a row of the batch", stores, True)
    yield _fact("state", "carried state, a row of the batch", schedule.state_bytes_per_row(segment), True)
    yield _fact("peak", "largest total while it runs", max(_largest(memory, s) for s in group.segments), True)
    if segment.masks_in_words:
        yield f"<div><dt>mask</dt><dd>{escape(segment.masks_in_words)}</dd></div>"


def _fact(key: str, name: str, count: int, in_bytes: bool = False) -> str:
    attribute, text = ("data-bytes", readable(count)) if in_bytes else ("data-count", f"{count:,}")
    return f'<div><dt>{name}</dt><dd data-figure="{key}" {attribute}="{count}">{text}</dd></div>'


def _largest(memory: StepMemory, segment: ScheduledSegment) -> int:
    return max((int(m.total) for m in memory.streamed if m.segment == segment.index), default=0)


def unchunked_html(memory: StepMemory, groups: list[Group]) -> str:
    """The table of what runs unchunked, and why."""
    rows = [_unchunked(memory, g) for g in groups if not g.first.chunked or g.first.kind == "unchunked"]
    if not rows:
        return "<p>Everything is chunked.</p>"
    head = "".join(f'<th scope="col">{h}</th>' for h in HEADS)
    return (
        f'<div class="scroll" tabindex="0"><table id="unchunked"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _unchunked(memory: StepMemory, group: Group) -> str:
    segment = group.first
    op = segment.refused or (segment.nodes[0] if segment.nodes else None)
    reason = segment.reason or "it computes next to nothing, or nothing that has rows"
    line, full = ("", "") if op is None else (place(op), source_line(op))
    peak = max(_largest(memory, s) for s in group.segments)
    name = "" if op is None else str(op.target)
    segment_cell = f'<a href="#segment-{segment.index}">{group.numbers}</a>'
    model_line = f'<code title="{escape(full)}">{escape(line)}</code>'
    texts = (segment_cell, escape(reason), f"<code>{escape(name)}</code>", model_line)
    cells = "".join(f'<td data-head="{h}">{text}</td>' for h, text in zip(HEADS, texts, strict=False))
    return (
        f'<tr data-refused="{str(not segment.chunked).lower()}">{cells}'
        f'<td class="number" data-head="{HEADS[-1]}" data-bytes="{peak}">{readable(peak)}</td></tr>'
    )
