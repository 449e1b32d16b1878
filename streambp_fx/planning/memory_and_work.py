"""What memory buys: ways to run a step, from the least memory to no recompute, beside unstreamed ones."""

from __future__ import annotations

from dataclasses import dataclass

from ..choosing.saving import Space
from ..cost import eager_step
from ..passes.s3_cut.policy import Policy

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


def ways_to_run(space: Space, resident: int) -> tuple[WayToRun, ...]:
    """From the least memory to no recompute, and the same step unstreamed, with checkpointing and without.

    Args:
        space: what may be saved of the step, on one device.
        resident: bytes of weights, gradients and optimizer states.
    """
    cost, sizes = space.cost, space.sizes
    least_work = eager_step.flops(cost, sizes)
    found = []
    for share in SHARES:
        policy = Policy(space.saving(space.count(int(share * space.saved[-1]))))
        moments = cost.storing(policy).timeline(sizes)
        held, work = max(m.total for m in moments), sum(m.flops for m in moments)
        found.append(_way(str(policy), True, resident + held, work, least_work))
    for checkpointing, what in ((True, "unstreamed, layers checkpointed"), (False, "unstreamed")):
        held = max(m.total for m in eager_step.timeline(cost, sizes, checkpointing))
        work = eager_step.flops(cost, sizes, checkpointing)
        found.append(_way(what, False, resident + held, work, least_work))
    return tuple(dict.fromkeys(found))


def _way(what: str, streamed: bool, peak: int, work: int, least_work: int) -> WayToRun:
    return WayToRun(what, streamed, int(peak), int(work), round(work / least_work, 4))
