"""What the independence probe tried, value by value and summed up by segment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..passes.graph.facts import Facts, Reach, Segment


@dataclass(frozen=True)
class Probe:
    """One value of the graph, what the analysis claims of it, and what came out.

    Attributes:
        segment: index of its segment; None in the epilogue.
        value: name of the value in the graph.
        op: the op that makes it.
        reach: which rows of its operands a row reads. FULL: only that other rows of the *query* are not read.
        window: rows of the window, if reach is WINDOW.
        rows: the rows r that were tried.
        contradictions: in words, what changed that should not have; empty if the claim held.
        line: the model's source line.
    """

    segment: int | None
    value: str
    op: str
    reach: Reach
    window: int | None
    rows: tuple[int, ...]
    contradictions: tuple[str, ...]
    line: str

    @property
    def ok(self) -> bool:
        """True if nothing contradicted the claim."""
        return not self.contradictions


@dataclass(frozen=True)
class NotClaimed:
    """A value, or all of a segment that runs unchunked, of which nothing is claimed."""

    segment: int | None
    value: str
    op: str
    reason: str
    line: str


@dataclass(frozen=True)
class SegmentSummary:
    """Identical segments in one line.

    Attributes:
        first, last: their indices.
        kind: as the schedule calls it.
        reach, window: the furthest claim of their values.
        values: how many values were tried.
        contradicted: how many of these did not do as claimed.
        reason: why nothing is claimed of them, or None.
    """

    first: int
    last: int
    kind: str
    reach: Reach
    window: int | None
    values: int
    contradicted: int
    reason: str | None


def summarize(facts: Facts, probes: Sequence[Probe]) -> list[SegmentSummary]:
    """One entry for each run of identical segments; values of the epilogue are in none."""
    by_segment: dict[int | None, list[Probe]] = {}
    for probe in probes:
        by_segment.setdefault(probe.segment, []).append(probe)

    def key(segment: Segment) -> tuple:
        own = by_segment.get(segment.index, [])
        return segment.signature or segment.index, len(own), any(not p.ok for p in own)

    found = []
    for _, run in itertools.groupby(facts.segments, key=key):
        group = list(run)
        own = [p for s in group for p in by_segment.get(s.index, [])]
        furthest = max(own, key=lambda p: p.reach, default=None)
        found.append(
            SegmentSummary(
                first=group[0].index,
                last=group[-1].index,
                kind=group[0].kind,
                reach=Reach.CONST if furthest is None else furthest.reach,
                window=None if furthest is None else furthest.window,
                values=len(own),
                contradicted=sum(not p.ok for p in own),
                reason=None if group[0].chunked else group[0].reason,
            )
        )
    return found
