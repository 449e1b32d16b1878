"""What memory buys: as much saved as fits, and the frontier of memory and work beside unstreamed steps."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ..choosing.saving import Space, choose_saving
from ..cost import eager_step
from ..cost.held_bytes import Moment, Sizes
from ..cost.step import StepCost
from ..passes.s3_cut.policy import Policy
from ..passes.step.saving import Saving

# Of all that may be saved, the shares that the frontier is shown for.
SHARES = (0, 0.02, 0.05, 0.1, 0.2, 0.35, 1)


@dataclass(frozen=True)
class WayToRun:
    """One way to run a step.

    Attributes:
        what: in words.
        streamed: it is one of ours.
        peak_bytes: with weights, gradients and optimizer states.
        flops: floating-point operations of products and attention.
        recompute_factor: those over the ones of a step that computes nothing twice.
    """

    what: str
    streamed: bool
    peak_bytes: int
    flops: int
    recompute_factor: float


def filled(cost: StepCost, sizes: Sizes, budget: int) -> Policy:
    """The policy that saves as much as fits a budget, in bytes of activations; inputs alone fit."""
    space = Space(cost, sizes)
    chosen = choose_saving(space, budget, cost.peak(sizes).total, _peak_of(cost, sizes))
    return Policy(chosen.saving) if chosen.spared else Policy()


def _peak_of(cost: StepCost, sizes: Sizes) -> Callable[[Saving], int]:
    return lambda saving: int(cost.storing(Policy(saving)).peak(sizes).total)


def ways_to_run(cost: StepCost, sizes: Sizes, resident: int) -> tuple[WayToRun, ...]:
    """From the least memory to no recompute, and the same step unstreamed, with checkpointing and without.

    Args:
        cost: of the step that saves inputs alone, on one device.
        sizes: as numbers.
        resident: bytes of weights, gradients and optimizer states.
    """
    space, least_work = Space(cost, sizes), eager_step.flops(cost, sizes)
    sums = [0, *itertools.accumulate(s.saved for s in space.steps)]
    found = []
    for share in SHARES:
        saving = space.saving(bisect.bisect_right(sums, int(share * sums[-1])) - 1)
        moments = cost.storing(Policy(saving)).timeline(sizes)
        found.append(_way(str(Policy(saving)), True, moments, resident, least_work))
    for checkpointing, what in ((True, "unstreamed, layers checkpointed"), (False, "unstreamed")):
        held = max(m.total for m in eager_step.timeline(cost, sizes, checkpointing))
        work = eager_step.flops(cost, sizes, checkpointing)
        found.append(WayToRun(what, False, resident + int(held), int(work), round(work / least_work, 4)))
    return tuple(dict.fromkeys(found))


def _way(what: str, streamed: bool, moments: list[Moment], resident: int, least_work: int) -> WayToRun:
    peak, work = max(m.total for m in moments), sum(m.flops for m in moments)
    return WayToRun(what, streamed, resident + int(peak), int(work), round(work / least_work, 4))
