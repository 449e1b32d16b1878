"""transfers: bytes of a step that go elsewhere and come back, by what the step program says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..passes.s6_schedule.offloading import moved
from .step import Sizes, StepCost
from .step_walk import StepWalk


@dataclass(frozen=True)
class Transfers:
    """Bytes of one step on one device: numbers or expressions, as the sizes are.

    Attributes:
        out: that leave for where there is more room.
        back: that come to the device from there.
    """

    out: Any = 0
    back: Any = 0


def transfers(cost: StepCost, sizes: Sizes) -> Transfers:
    """What one step moves.

    What is kept for the backward leaves once and comes back once. Rows that lie elsewhere all the time leave
    once, where they are made, and come back for each program that reads them, see NOTE [rows elsewhere].

    Args:
        cost: of the step; its policy says what lies elsewhere.
        sizes: of the step.
    """
    program = cost.step_of(sizes)
    walk = StepWalk(cost, program, sizes)
    kept = sum(walk.bytes_of(value) for value in moved(program))
    for _ in walk.moments():
        pass
    return Transfers(kept + walk.out, kept + walk.back)
