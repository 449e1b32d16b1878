"""The graph of segments: identical neighbours in one box, what flows between boxes, and carried states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

from torch.fx import Node

from ...passes.graph.facts import Reach
from ...passes.s3_cut.alive_bytes import row_bytes
from ...units import readable
from ..scheduled_segment import READS, ScheduledSegment, numbers
from ..scheduled_step import ScheduledStep

# Sizes of the drawing in CSS pixels: it is shown as large as it is, and fits a phone.
WIDTH, BOX, GAP, LEFT, RIGHT = 340, 62, 34, 34, 258
MIDDLE = (LEFT + RIGHT) // 2
INPUTS = -1


@dataclass
class Group:
    """A run of identical segments.

    Attributes:
        segments: they, in order.
        twin: index of the first segment in the schedule that runs the same programs.
        sources: bytes a row of the batch that come from each group, by its number; `INPUTS` for the inputs.
    """

    segments: list[ScheduledSegment]
    twin: int
    sources: dict[int, float] = field(default_factory=dict)

    @property
    def first(self) -> ScheduledSegment:
        """The first segment of the run."""
        return self.segments[0]

    @property
    def numbers(self) -> str:
        """Their indices: "3", "1-36"."""
        return numbers(self.segments)

    @property
    def title(self) -> str:
        """What the page calls the run: "segment 3", "segments 1-36"."""
        return f"{'segment' if len(self.segments) == 1 else 'segments'} {self.numbers}"


def groups_of(schedule: ScheduledStep) -> list[Group]:
    """Runs of identical segments, and what each of them takes from which other one."""
    twins: dict[str, int] = {}
    groups = []
    for _, run in itertools.groupby(schedule.segments, key=lambda s: s.programs_key):
        segments = list(run)
        first = segments[0]
        groups.append(Group(segments, twins.setdefault(first.programs_key, first.index)))
    number = {s.index: k for k, g in enumerate(groups) for s in g.segments}
    made = {n: s.index for s in schedule.segments for n in s.outputs}
    for k, group in enumerate(groups):
        for segment in group.segments:
            for node in (n for n in _taken(segment, made) if number.get(made.get(n, -1), INPUTS) != k):
                source = number[made[node]] if node in made else INPUTS
                group.sources[source] = group.sources.get(source, 0) + _finite(
                    row_bytes(schedule.facts, node)
                )
        if not group.sources:
            group.sources[INPUTS] = 0
    return groups


def _taken(segment: ScheduledSegment, made: Iterable[Node]) -> list[Node]:
    return [*segment.rows, *(n for n in segment.constants if n in made)]


def _finite(count: float) -> float:
    return 0 if math.isinf(count) else count


def reads(segment: ScheduledSegment) -> str:
    """How far the rows of a segment read, in words."""
    if not segment.chunked:
        return "all rows"
    known = READS[segment.reach]
    return known.format(window=segment.window or "some") if segment.reach is Reach.WINDOW else known


def graph_svg(schedule: ScheduledStep, groups: list[Group]) -> str:
    """The drawing: boxes from top to bottom, each a link to the segment's details."""
    height = _top(len(groups)) + 18
    parts = [_word("inputs", MIDDLE, 12)]
    for k, group in enumerate(groups):
        parts += [_box(schedule, k, group), *(_edge(s, k, b) for s, b in sorted(group.sources.items()))]
    end = _top(len(groups))
    parts += [_arrow(MIDDLE, end - GAP, end - 4), _word("outputs", MIDDLE, end + 12)]
    return (
        f'<svg class="graph" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="group" '
        f'aria-label="graph of segments">{"".join(parts)}</svg>'
    )


def _top(k: int) -> int:
    return 18 + GAP + k * (BOX + GAP)


def _box(schedule: ScheduledStep, k: int, group: Group) -> str:
    segment, top = group.first, _top(k)
    chunks = schedule.chunks(segment)
    how = f"{segment.kind}, " + ("runs unchunked" if not segment.chunked else f"{chunks} chunks")
    how = "runs unchunked" if segment.kind == "unchunked" else how
    many = f" ({len(group.segments)} times)" if len(group.segments) > 1 else ""
    state = schedule.state_bytes_per_row(segment)
    loop = ""
    if state:
        y, x = top + BOX // 2, RIGHT
        loop = (
            f'<path class="edge" d="M{x} {y - 10}C{x + 30} {y - 16} {x + 30} {y + 16} {x + 3} {y + 10}"/>'
            f'<path class="head" d="M{x} {y + 9}l8 -2l-3 6z"/>'
            f'<text class="small" x="{x + 27}" y="{y - 2}">state</text>'
            f'<text class="small" x="{x + 27}" y="{y + 12}">{readable(state)}</text>'
        )
    whole = " whole" if not segment.chunked else ""
    return (
        f'<a href="#segment-{segment.index}"><rect class="box{whole}" x="{LEFT}" y="{top}" '
        f'width="{RIGHT - LEFT}" height="{BOX}" rx="6"/>'
        f'<text class="name" x="{LEFT + 10}" y="{top + 19}">{group.title}{many}</text>'
        f'<text class="small" x="{LEFT + 10}" y="{top + 36}">{escape(how)}</text>'
        f'<text class="small" x="{LEFT + 10}" y="{top + 52}">reads {escape(reads(segment))}</text></a>{loop}'
    )


def _edge(source: int, target: int, count: float) -> str:
    """An arrow to the next box, or an arc on the left past the boxes between."""
    start, end = _top(source) + BOX if source != INPUTS else 18, _top(target)
    label = f"{readable(count)} a row" if count else ""
    if source == target - 1:
        return _arrow(MIDDLE, start, end - 4) + _word(label, MIDDLE + 8, (start + end) // 2 + 1, "small")
    side, end = LEFT - min(10 + 8 * (target - source), 44), end + 12
    begin = f"M{LEFT} {start - 12}" if source != INPUTS else f"M{MIDDLE - 24} 8H{LEFT}"
    return (
        f'<path class="edge" d="{begin}C{side} {start} {side} {end} {LEFT - 6} {end}"/>'
        f'<path class="head" d="M{LEFT} {end}l-8 -4v8z"/>{_word(label, LEFT, _top(target) - 6, "small")}'
    )


def _arrow(x: int, start: int, end: int) -> str:
    return f'<path class="edge" d="M{x} {start}V{end}"/><path class="head" d="M{x} {end + 4}l-4 -8h8z"/>'


def _word(text: str, x: int, y: int, style: str = "small middle") -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>' if text else ""
