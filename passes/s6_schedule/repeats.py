"""Repetitions in a list, so that each pattern is shown once."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """`times` times the same `period` entries, the first at `start`."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        """Index one past the last entry."""
        return self.start + self.period * self.times


def repeats(keys: Sequence[Hashable]) -> list[Repeat]:
    """Cover a list from its start with repetitions, the longest first; single entries have `times` 1.

    Of repetitions that cover the same, the one with the shortest period is taken.
    """
    found, start = [], 0
    while start < len(keys):
        best = max(
            (_repeat(keys, start, period) for period in range(1, (len(keys) - start) // 2 + 1)),
            key=lambda r: (r.stop if r.times > 1 else start, -r.period),
            default=Repeat(start, 1, 1),
        )
        found.append(best if best.times > 1 else Repeat(start, 1, 1))
        start = found[-1].stop
    return found


def _repeat(keys: Sequence[Hashable], start: int, period: int) -> Repeat:
    # how far the list agrees with itself, moved by one period
    pairs = zip(
        itertools.islice(keys, start, None), itertools.islice(keys, start + period, None), strict=False
    )
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Repeat(start, period, 1 + alike // period)
