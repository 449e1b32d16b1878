"""What memory buys: ways to run a step, from the least memory to no recompute, beside unstreamed ones."""

from __future__ import annotations

from dataclasses import dataclass

from ..choosing.saving import Space
from ..cost import eager_step
from ..passes.s3_cut.policy import Policy
from .rates import Rates
from .timing import step_time

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
        seconds: that it takes, a prediction; None: no device was given.
    """

    what: str
    streamed: bool
    peak_bytes: int
    flops: int
    recompute_factor: float
    seconds: float | None = None


def ways_to_run(space: Space, resident: int, rates: Rates | None = None) -> tuple[WayToRun, ...]:
    """From the least memory to no recompute, and the same step unstreamed, with checkpointing and without.

    Args:
        space: what may be saved of the step, on one device.
        resident: bytes of weights, gradients and optimizer states.
        rates: of the device, if times are asked for.
    """
    cost, sizes = space.cost, space.sizes
    least_work = eager_step.flops(cost, sizes)
    found = []

    def add(what: str, streamed: bool, held: int, flops: int, seconds: float | None) -> None:
        factor = round(flops / least_work, 4)
        found.append(WayToRun(what, streamed, int(resident + held), int(flops), factor, seconds))

    for share in SHARES:
        policy = Policy(space.saving(space.count(int(share * space.saved[-1]))))
        moments = cost.storing(policy).timeline(sizes)
        seconds = None if rates is None else step_time(moments, rates).seconds
        add(str(policy), True, max(m.total for m in moments), sum(m.flops for m in moments), seconds)
    for checkpointing, what in ((True, "unstreamed, layers checkpointed"), (False, "unstreamed")):
        held = max(m.total for m in eager_step.timeline(cost, sizes, checkpointing))
        work = eager_step.work(cost, sizes, checkpointing)
        add(what, False, held, work.flops, None if rates is None else rates.seconds(work))
    return tuple(dict.fromkeys(found))
