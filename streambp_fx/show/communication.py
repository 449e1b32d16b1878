"""What several devices gather and sum over a step, in its place on the time axis."""

from __future__ import annotations

from dataclasses import dataclass

from ..passes.s6_schedule.collectives import Collective
from .step_memory import StepMemory


@dataclass(frozen=True)
class Bar:
    """Collectives of one direction that are in one place.

    Attributes:
        start: where, in [0, 1] of the step.
        gathers: they bring what other devices have; otherwise they sum.
        collectives: in order.
    """

    start: float
    gathers: bool
    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all that is gathered or summed here."""
        return sum(c.bytes for c in self.collectives)


def bars(memory: StepMemory) -> list[Bar]:
    """The collectives of a step in their places, those that share one together."""
    found: dict[tuple[float, bool], list[Collective]] = {}
    for start, moment in zip(memory.starts("streamed"), memory.streamed, strict=True):
        if moment.collective is not None:
            brings = not moment.collective.kind.sums
            found.setdefault((round(start, 4), brings), []).append(moment.collective)
    return [Bar(start, gathers, tuple(own)) for (start, gathers), own in found.items()]
