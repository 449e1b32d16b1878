"""The collectives of a step as text, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..cost.held_bytes import Moment
from ..passes.s6_schedule.collectives import Collective, CollectiveKind
from ..passes.s6_schedule.repeats import repeats
from ..units import readable


class Placed(NamedTuple):
    """A collective, and the segment before which something is gathered, or after which it is summed."""

    phase: str
    segment: int
    collective: Collective


def collective_lines(moments: Iterable[Moment]) -> list[str]:
    """A line for each collective or run of equal ones; none if the step has none.

    Args:
        moments: of the step, with numbers for the sizes.
    """
    placed = ((m.phase, m.segment, m.collective) for m in moments)
    found = [Placed(phase, segment, own) for phase, segment, own in placed if own is not None]
    if not found:
        return []
    devices, sent = found[0].collective.devices, sum(p.collective.sent_bytes for p in found)
    lines = [f"collectives between {devices} devices, in order; each sends {readable(sent)} a step:"]
    for repeat in repeats([_key(p) for p in found]):
        every = found[repeat.start : repeat.stop]
        if repeat.period > 1:
            lines.append(f"  {repeat.times} times these {repeat.period}:")
        indent = "   " if repeat.period > 1 else "  "
        for first in range(repeat.period):
            lines.append(indent + _line(every[first :: repeat.period]))
    return lines


def _key(placed: Placed) -> tuple[str, CollectiveKind, int, int, bool]:
    own = placed.collective
    return placed.phase, own.kind, own.bytes, own.calls, own.of_caller


def _line(run: Sequence[Placed]) -> str:
    first, last = run[0].collective, run[-1].collective
    name = first.name if first.name == last.name else name_range(first.name, last.name)
    each = f"{readable(first.bytes)}{'' if len(run) == 1 else ' each'}"
    calls = f", block by block in {first.calls:,} calls" if first.calls != 1 else ""
    return f"{first.kind.value:<15} {each:<14}  {name}: {_where(run, first)}{calls}"


def _where(run: Sequence[Placed], first: Collective) -> str:
    gathers = first.kind is CollectiveKind.ALL_GATHER
    if first.of_caller and gathers == (run[0].phase == "forward"):
        return "before the forward" if gathers else "after the backward"
    if first.name.endswith(f"of segment {run[0].segment}"):  # within the segment, which is named already
        return run[0].phase
    start, end = run[0].segment, run[-1].segment
    which = f"segment {start}" if len(run) == 1 else f"segments {start} to {end}"
    return f"{run[0].phase}, {'before' if gathers else 'after'} {which}"


def name_range(first: str, last: str) -> str:
    """Two names that begin alike, as one: "model.layers.0 to 35"."""
    pairs = itertools.zip_longest(*(_parts(name) for name in (first, last)))
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = ".".join(_parts(last)[alike:]) if alike else last
    return f"{first} to {rest}"


def _parts(name: str) -> list[str]:
    return name.replace(" ", ".").split(".")
