"""The plan of a step on several devices: what each holds, sends and waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from ..cost.held_bytes import GATHERED, Moment
from ..cost.transfers import Transfers
from ..passes.s6_schedule.collectives import Collective, CollectiveKind
from .engines import Engine
from .rates import Rates
from .timing import PartTime, StepTime, step_time

NOTHING = Transfers()


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step.

    Attributes:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        count: how many there are.
        bytes: of what is gathered or summed, all together.
        sent_bytes: that each device sends for it, and it receives as many.
    """

    kind: str
    count: int
    bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class GroupTraffic:
    """What is gathered and summed together in a step: a layer, the rest of the model, a bucket.

    Attributes:
        name: of the module, or the number of the bucket.
        gathers: how often it is gathered.
        bytes: of one gather; without a gather, of the sum.
        sent_bytes: that each device sends for all of it.
    """

    name: str
    gathers: int
    bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class DevicesPlan:
    """What is predicted of several devices; see `Plan` for what each of them holds.

    Attributes:
        gpus: how many devices.
        context_parallel: how many of them share each sequence.
        shard: the engine.
        wrap, reshard_after_forward: its settings, where it is FSDP2.
        gathered_peak_bytes: the most that is there of parameters in full size, those on their way among them.
        traffic: collectives of the step by kind.
        groups: collectives by what they gather and sum.
        sent_bytes: that each device sends in a step, and it receives as many.
        after_step_bytes: of weights that are gathered after the optimizer has changed them (ZeRO-1 and -2).
    """

    gpus: int
    shard: str
    wrap: str
    reshard_after_forward: bool
    gathered_peak_bytes: int
    traffic: tuple[Traffic, ...]
    groups: tuple[GroupTraffic, ...]
    sent_bytes: int
    after_step_bytes: int
    context_parallel: int = 1


@dataclass(frozen=True)
class TimePlan:
    """A time that is predicted and was not measured.

    Attributes:
        seconds: of the step, without the optimizer's own work.
        compute_seconds: in which a device computes.
        link_seconds: of collectives, hidden ones among them.
        waited_seconds: in which a device computes nothing, because it waits for a collective, or for what
            was offloaded: as much of that as takes longer than all else.
        moved_seconds: of what is offloaded and comes back, beside the computation; None: it is not known.
        tokens_per_second: of all devices together.
        assumed: the rates, in words.
        parts: of the step, in order.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    waited_seconds: float
    tokens_per_second: float
    assumed: tuple[str, ...]
    parts: tuple[PartTime, ...] = field(repr=False)
    moved_seconds: float | None = 0.0


def devices_plan(engine: Engine, model: nn.Module, moments: list[Moment]) -> DevicesPlan:
    """What is predicted of several devices.

    Args:
        engine: which shares the model.
        model: weights may be on meta.
        moments: of the step, with numbers for the sizes.
    """
    called = [m.collective for m in moments if m.collective is not None]
    after = engine.after_step(model)
    return DevicesPlan(
        gpus=engine.devices,
        shard=engine.name,
        wrap=engine.wrap,
        reshard_after_forward=engine.reshard,
        gathered_peak_bytes=int(max((m.bytes.get(GATHERED, 0) for m in moments), default=0)),
        traffic=tuple(found for kind in CollectiveKind if (found := _traffic(called, kind)).count),
        groups=tuple(_by_group(called)),
        sent_bytes=sum(c.sent_bytes for c in called) + _after(engine, after).sent_bytes,
        after_step_bytes=after,
        context_parallel=engine.context_parallel,
    )


def time_plan(
    moments: list[Moment],
    rates: Rates,
    tokens: int,
    engine: Engine | None = None,
    after: int = 0,
    moved: Transfers = NOTHING,
) -> TimePlan:
    """The time of a step.

    Args:
        moments: of the step, with numbers for the sizes.
        rates: of the devices.
        tokens: of one device's batch, which it may share.
        engine: None: there is one device.
        after: bytes that are gathered after the step.
        moved: what is offloaded and comes back.

    NOTE [transfers beside the computation]: what is offloaded leaves behind the computation and is asked for
    ahead of it, so a step takes as long as the longer of the two. The first and the last transfer, beside
    which nothing is computed, are not counted.
    """
    moving = _moving(rates, moved)
    found: StepTime = step_time(moments, rates)
    last = 0.0 if engine is None or not after else _after(engine, after).sent_bytes / rates.bandwidth
    waited = max(0.0, (moving or 0.0) - found.seconds)
    seconds = found.seconds + waited + last
    batches = 1 if engine is None else engine.devices // engine.context_parallel
    return TimePlan(
        seconds=seconds,
        compute_seconds=found.compute_seconds,
        link_seconds=found.link_seconds + last,
        waited_seconds=found.waited_seconds + waited + last,
        tokens_per_second=tokens * batches / seconds if seconds else 0.0,
        assumed=tuple(rates.lines()),
        parts=found.parts,
        moved_seconds=moving,
    )


def _moving(rates: Rates, moved: Transfers) -> float | None:
    """Seconds of transfers; None if it is not known how fast they are."""
    if not moved.out and not moved.back:
        return 0.0
    return None if rates.place is None else rates.place.seconds(moved)


def _after(engine: Engine, size: int) -> Collective:
    return Collective(CollectiveKind.ALL_GATHER, "weights", engine.devices, size, ahead=False)


def _traffic(called: list[Collective], kind: CollectiveKind) -> Traffic:
    own = [c for c in called if c.kind is kind]
    return Traffic(
        kind.value, sum(c.calls for c in own), sum(c.bytes for c in own), sum(c.sent_bytes for c in own)
    )


def _by_group(called: list[Collective]) -> list[GroupTraffic]:
    gathers = Counter(c.name for c in called if c.kind is CollectiveKind.ALL_GATHER)
    names = dict.fromkeys(c.name for c in called)
    first = {c.name: c.bytes for c in reversed(called)}
    sent = {name: sum(c.sent_bytes for c in called if c.name == name) for name in names}
    return [GroupTraffic(name, gathers[name], first[name], sent[name]) for name in names]
