"""What memory buys, measured: our steps from the least memory to no recompute, and every point of the peers.

    make bench ARGS="--frontier"            # the case dense; or --case long, or --quick

Peers are checkpointing, selective checkpointing by PyTorch's policies, checkpointing with offloading, eager,
and Inductor's `activation_memory_budget` at ten settings. Ours are asked for by `memory=` alone, which
chooses the chunk as well, at amounts between what the smallest of ours (in the case's chunk) and eager need.

NOTE [times in groups]: all processes that are timed together are alive together, see NOTE [turns], and those
that recompute little hold gigabytes. So they are timed in groups that fit into memory, and in each group
beside checkpointing: a point's time is its share of checkpointing's in the same group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from streambp_fx.choosing.budget import free_bytes

from .cases import Workload
from .measuring import Meter, Result
from .modes import MODES, PEER, Mode
from .tables import MIB, new_table, number, yes_or_no

PEERS = (
    *("eager", "checkpointing", "checkpointing-chunked-loss", "checkpointing-fused-loss"),
    *("checkpointing-offload", "checkpointing-offload-chunked-loss", "checkpointing-offload-fused-loss"),
    *("selective-attention", "selective-products"),
)
#: Settings of Inductor's `activation_memory_budget`.
BUDGETS = tuple(k / 10 for k in range(1, 11))
#: How many budgets of ours.
POINTS = 8
#: Share of the free memory that processes timed together may take, and what a process takes beside a step.
SHARE, PROCESS = 0.6, 600 * MIB
#: Times of equal steps differ by that much.
NOISE = 1.02


@dataclass(frozen=True)
class Point:
    """A mode's peak, and its time.

    Attributes:
        result: of the mode.
        time: of a step, as a share of checkpointing's in the same group; None: not measured.
    """

    result: Result
    time: float | None = None

    @property
    def peak(self) -> int:
        """Bytes over weights and gradients."""
        return self.result.peak_bytes or 0

    def is_beaten_by(self, other: Point) -> bool:
        """True if another takes no more memory and no more time, but for noise."""
        if self.time is None or other.time is None:
            return other.peak <= self.peak
        return other.peak <= self.peak and other.time <= self.time * NOISE

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; bytes, and a share of checkpointing's time."""
        return {**self.result.as_dict(), "time": self.time}


def peers() -> list[Mode]:
    """Every point of the peers."""
    compiled = [
        Mode(
            f"compile-{budget}",
            f"torch.compile, activation_memory_budget={budget}",
            "compile",
            f"Inductor, one graph that returns the loss alone, activation_memory_budget={budget}",
            {"budget": budget},
        )
        for budget in BUDGETS
    ]
    return [*(MODES[name] for name in PEERS), *compiled]


def ours(least: int, most: int, count: int = POINTS) -> list[Mode]:
    """Streamed steps with budgets between two peaks, evenly by their logarithms.

    Args:
        least, most: bytes.
        count: how many.
    """
    budgets = [round(least * (most / least) ** (k / count) / MIB) or 1 for k in range(1, count + 1)]
    return [
        Mode(
            f"streamed-{n}",
            f'streamed, memory="{n}MiB"',
            "streamed",
            f'memory="{n}MiB"',
            {"policy": "auto", "memory": f"{n}MiB", "chunk": "auto"},
        )
        for n in dict.fromkeys(budgets)
    ]


def run_frontier(meter: Meter, workload: Workload, time: bool = True) -> list[Point]:
    """Measure every point on one workload: peaks first, and then times.

    Args:
        meter: opened.
        workload: the step.
        time: measure times as well.
    """
    smallest = MODES["streamed"]
    found = [smallest, *peers()]
    meter.measure([(workload, mode) for mode in found], time=False)
    peaks = [meter.result(workload, mode).peak_bytes for mode in (smallest, MODES["eager"])]
    if None not in peaks:
        more = ours(*peaks)  # type: ignore[arg-type]
        meter.measure([(workload, mode) for mode in more], time=False)
        found += more
    results = [meter.result(workload, mode) for mode in found]
    measured = [r for r in results if r.peak_bytes]
    if not time:
        return [Point(r) for r in measured]
    peer = meter.result(workload, MODES[PEER])
    return [point for group in groups(measured, peer) for point in _timed(meter, workload, group)]


def groups(results: Sequence[Result], peer: Result, free: int | None = None) -> Iterator[list[Result]]:
    """Results whose processes fit into memory together, each group with checkpointing first.

    Args:
        results: with peaks.
        peer: of checkpointing.
        free: bytes; None: what is free now.
    """
    room = int(SHARE * ((free or free_bytes(torch.device("cpu"))) or 8 * 2**30))
    need = lambda r: (r.peak_bytes or 0) + PROCESS  # noqa: E731
    group: list[Result] = [peer]
    for result in sorted((r for r in results if r is not peer), key=need):
        if len(group) > 1 and sum(map(need, group)) + need(result) > room:
            yield group
            group = [peer]
        group.append(result)
    yield group


def _timed(meter: Meter, workload: Workload, group: Sequence[Result]) -> list[Point]:
    """The points of a group; checkpointing's own is that of the first group that has it."""
    before = [len(r.seconds) for r in group]
    meter.time_again([(workload, r.mode) for r in group])
    took = [statistics.median(r.seconds[n:] or [float("nan")]) for r, n in zip(group, before, strict=True)]
    first = 0 if before[0] == 0 else 1
    return [Point(r, t / took[0]) for r, t in list(zip(group, took, strict=True))[first:]]


def beside(points: Sequence[Point]) -> list[tuple[Point, Point | None]]:
    """For each point of a peer the fastest of ours that takes no more memory; None: there is none."""
    own = [p for p in points if p.result.mode.ours]
    found = []
    for point in (p for p in points if not p.result.mode.ours):
        fitting = [p for p in own if p.peak <= point.peak]
        found.append((point, min(fitting, key=lambda p: (p.time or 0, p.peak), default=None)))
    return found


def frontier_tables(workload: Workload, points: Sequence[Point]) -> list[Table]:
    """Our points, and for each point of a peer whether one of ours lies below it and to its left."""
    columns = ("mode", "peak MiB", "of checkpointing's time")
    mine = new_table(f"Ours: {workload.title}", *columns)
    for point in sorted((p for p in points if p.result.mode.ours), key=lambda p: p.peak):
        mine.add_row(point.result.mode.name, number(point.peak / MIB, ".1f"), number(point.time))
    theirs = new_table("Peers, and the fastest of ours in no more memory", *columns, *columns, "beaten")
    for point, other in sorted(beside(points), key=lambda pair: pair[0].peak):
        shown = (
            ("-", "-", "-")
            if other is None
            else (other.result.mode.name, number(other.peak / MIB, ".1f"), number(other.time))
        )
        beaten = other is not None and point.is_beaten_by(other)
        name = point.result.mode.name
        theirs.add_row(name, number(point.peak / MIB, ".1f"), number(point.time), *shown, yes_or_no(beaten))
    theirs.caption = f"beaten: no more memory, and no more time but for {NOISE - 1:.0%}"
    theirs.caption_justify = "left"
    return [mine, theirs]
