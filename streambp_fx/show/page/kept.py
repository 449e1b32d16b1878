"""What is kept for the backward: a table of values by segments, and of which share of the rows."""

from __future__ import annotations

import itertools
from fractions import Fraction
from html import escape

from ...units import readable
from ..scheduled_segment import ScheduledSegment, numbers
from ..scheduled_step import ScheduledStep

#: The first row: what comes into a segment has another name in each.
INPUT = "input of the segment"

# By value: bytes a row of the batch, and the share of the rows of which it is kept.
Kept = dict[str, tuple[int, Fraction]]


def kept_html(schedule: ScheduledStep) -> str:
    """The table; neighbours that keep the same share a column."""
    columns = [
        (list(run), kept) for kept, run in itertools.groupby(filter(_kept, schedule.segments), key=_kept)
    ]
    if not columns:
        return "<p>Nothing is kept.</p>"
    tokens = schedule.seq_len or 0
    names = list(dict.fromkeys(name for _, kept in columns for name in kept))
    heads = "".join(f'<th scope="col" class="number">{numbers(run)}</th>' for run, _ in columns)
    rows = "".join(_row(name, columns, tokens) for name in names)
    totals = [sum(_bytes(one, tokens) for one in kept.values()) for _, kept in columns]
    sums = "".join(f'<td class="number" data-bytes="{t}">{readable(t)}</td>' for t in totals)
    states = schedule.kept_states_in_words()
    return (
        '<div class="scroll" tabindex="0"><table id="kept-values"><thead><tr><th scope="col">value</th>'
        f'<th scope="col" class="number">bytes a row</th>{heads}</tr></thead><tbody>{rows}</tbody>'
        f'<tfoot><tr><th scope="row">in each segment</th><td></td>{sums}</tr></tfoot></table></div>'
        + (f"<p>And {states}.</p>" if states else "")
    )


def _kept(segment: ScheduledSegment) -> Kept:
    """What a segment keeps; its inputs together, under one name."""
    inputs = [n.name for n in segment.rows]
    found: Kept = {}
    for name, (size, share) in segment.kept.items():
        key = INPUT if name in inputs else name
        before = found.get(key, (0, share))[0] if key == INPUT else 0
        found[key] = before + size, share
    return found


def _bytes(kept: tuple[int, Fraction], tokens: int) -> int:
    size, share = kept
    return int(size * share * tokens)


def _row(name: str, columns: list[tuple[list[ScheduledSegment], Kept]], tokens: int) -> str:
    size = max(kept[name][0] for _, kept in columns if name in kept)
    cells = "".join(_cell(kept.get(name), tokens) for _, kept in columns)
    return f'<tr><th scope="row"><code>{escape(name)}</code></th><td class="number">{size:,}</td>{cells}</tr>'


def _cell(kept: tuple[int, Fraction] | None, tokens: int) -> str:
    if kept is None:
        return '<td class="kept" data-share="0"></td>'
    share = kept[1]
    text = "all" if share == 1 else f"{float(share):.0%}"
    return (
        f'<td class="kept number" data-share="{float(share):.4g}" style="--share: {float(share):.2f}" '
        f'title="{share} of the rows, {readable(_bytes(kept, tokens))}">{text}</td>'
    )
