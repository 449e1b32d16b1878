"""How long a step takes at given rates, and which collectives are hidden behind computation.

NOTE [one link]: collectives run one after the other, in the order in which they begin, beside the
computation. A gather that an engine begins ahead begins with the computation of the part before the one that
reads it; a sum begins when its gradients are there. A part waits for its own gathers, and the step for all
sums. How long computing takes see NOTE [what takes time] in `passes.cost.work`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..cost.held_bytes import Moment
from ..passes.cost.work import Work
from ..passes.s6_schedule.collectives import Collective, CollectiveKind
from .rates import Rates


@dataclass(frozen=True)
class PartTime:
    """What a device computes between two collectives, and what is on the link beside it.

    Attributes:
        phase: "forward" or "backward".
        segment: index of the segment that runs.
        seconds: of computing.
        sent_bytes: that each device sends meanwhile: for the gathers of the next part, if they begin ahead,
            and the sums of the one before.
        link_seconds: that this takes.
        waited_seconds: before it, for its own gathers and for what does not run beside anything.
        hidden: what is on the link beside it takes no longer than it does.
    """

    phase: str
    segment: int
    seconds: float
    sent_bytes: int
    link_seconds: float
    waited_seconds: float
    hidden: bool


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: of the step, without the optimizer.
        compute_seconds: of computing.
        link_seconds: of collectives, hidden ones among them.
        parts: in order.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    parts: tuple[PartTime, ...] = field(repr=False)

    @property
    def waited_seconds(self) -> float:
        """Seconds in which nothing is computed, because a collective is waited for."""
        return self.seconds - self.compute_seconds


@dataclass
class _Part:
    phase: str
    segment: int
    work: Work = field(default_factory=Work)
    gathers: list[Collective] = field(default_factory=list)
    sums: list[Collective] = field(default_factory=list)


def step_time(moments: Iterable[Moment], rates: Rates) -> StepTime:
    """How long a step takes.

    Args:
        moments: of the step, with numbers for the sizes.
        rates: of the devices and of what connects them.
    """
    parts = _parts(moments)
    link = _Link(rates)
    now, found = 0.0, []
    ready = link.run([c for part in parts[:1] for c in part.gathers], 0.0)
    for number, part in enumerate(parts):
        start = max(now, ready)
        following = parts[number + 1].gathers if number + 1 < len(parts) else []
        end = start + rates.seconds(part.work)
        ready = link.run([c for c in following if c.ahead], start)
        done = link.run(part.sums, end)
        wait = max([end, *([done] if any(not c.ahead for c in part.sums) else [])])
        late = [c for c in following if not c.ahead]
        ready = max(ready, link.run(late, wait)) if late else ready
        before = parts[number - 1].sums if number else []
        beside = [c for c in (*following, *before) if c.ahead]
        found.append(_time(part, end - start, start - now, beside, link))
        now = wait
    total = max(now, link.free)
    seconds = sum(p.seconds for p in found)
    together = [c for part in parts for c in (*part.gathers, *part.sums)]
    return StepTime(total, seconds, sum(map(link.seconds, together)), tuple(found))


def _time(part: _Part, seconds: float, waited: float, beside: list[Collective], link: _Link) -> PartTime:
    sent, on_link = sum(c.sent_bytes for c in beside), sum(map(link.seconds, beside))
    hidden = on_link <= seconds
    return PartTime(part.phase, part.segment, seconds, sent, on_link, waited, hidden)


class _Link:
    """What connects the devices.

    Attributes:
        free: when what has begun on it will have ended, in seconds.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates, self.free = rates, 0.0

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes."""
        return collective.sent_bytes / self.rates.bandwidth if collective.sent_bytes else 0.0

    def run(self, found: list[Collective], earliest: float) -> float:
        """When these have ended, in seconds; `earliest` if there are none."""
        if not found:
            return earliest
        self.free = max(self.free, earliest) + sum(map(self.seconds, found))
        return self.free


def _parts(moments: Iterable[Moment]) -> list[_Part]:
    found: list[_Part] = []
    gathers: list[Collective] = []
    for moment in moments:
        collective = moment.collective
        if collective is not None and collective.kind is CollectiveKind.ALL_GATHER:
            gathers.append(collective)
            continue
        key = moment.phase, moment.segment
        last = found[-1] if found else None
        alike = last is not None and (last.phase, last.segment) == key
        if collective is not None:
            if last is None:
                found.append(last := _Part(*key))
            last.sums.append(collective)
            continue
        if last is None or not alike or gathers or last.sums:
            found.append(last := _Part(*key, gathers=gathers))
            gathers = []
        last.work += moment.work
    return found
