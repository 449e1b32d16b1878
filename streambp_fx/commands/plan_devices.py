"""What `streambp-fx plan` prints of several devices, and of time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence

from rich.table import Table

from ..planning.several import DevicesPlan, GroupTraffic, TimePlan
from ..planning.timing import PartTime
from ..show.collectives_text import name_range
from ..units import readable


def device_lines(devices: DevicesPlan) -> list[str]:
    """What holds for several devices, in sentences."""
    how = {"layers": "each layer, then the model", "model": "the model as a whole"}[devices.wrap]
    kept = "" if devices.reshard_after_forward else "; layers stay gathered until the backward"
    engine = f"fsdp2 ({how}{kept})" if devices.shard == "fsdp2" else devices.shard
    whose = "Memory and lengths are those of one GPU, which has its own batch."
    if devices.context_parallel > 1:
        together = f"{devices.context_parallel} GPUs share each sequence and have a batch together."
        whose = f"{together} Memory is that of one GPU, lengths are of whole sequences."
    found = [
        f"{devices.gpus} GPUs, {engine}. {whose}",
        f"Each GPU sends {readable(devices.sent_bytes)} a step and receives as much, collectives in rings.",
    ]
    if devices.gathered_peak_bytes:
        peak = readable(devices.gathered_peak_bytes)
        found.append(f"Parameters in full size, those on their way among them: {peak} at most.")
    if devices.after_step_bytes:
        size = readable(devices.after_step_bytes)
        found.append(f"After the optimizer's step the weights are gathered: {size}, counted in what is sent.")
    return found


def traffic_table(devices: DevicesPlan) -> Table:
    """The collectives of a step by kind, then by what they gather and sum."""
    table = Table(title="collectives of a step")
    table.add_column("")
    for heading in ("how many", "bytes in all", "sent by each GPU"):
        table.add_column(heading, justify="right")
    for kind in devices.traffic:
        table.add_row(kind.kind, f"{kind.count}", readable(kind.bytes), readable(kind.sent_bytes))
    table.add_section()
    for run in _runs(devices.groups):
        first, last = run[0], run[-1]
        name = first.name if first is last else f"{name_range(first.name, last.name)}, each"
        how = f"{first.gathers} gathered" if first.gathers else "summed"
        table.add_row(name, how, readable(first.bytes), readable(first.sent_bytes))
    return table


def _runs(groups: Sequence[GroupTraffic]) -> Iterator[list[GroupTraffic]]:
    """Those that are alike but for a number in their name, together."""
    found: dict[Hashable, list[GroupTraffic]] = {}
    for group in groups:
        alike = re.sub(r"\d+", "", group.name), group.gathers, group.bytes, group.sent_bytes
        found.setdefault(alike, []).append(group)
    yield from found.values()


def time_lines(time: TimePlan) -> list[str]:
    """The time of a step, what it consists of, and what it was predicted from."""
    whole, waited, link = map(_seconds, (time.seconds, time.waited_seconds, time.link_seconds))
    rate = f"{time.tokens_per_second:,.0f} tokens a second in all"
    found = [f"Predicted, not measured: {whole} a step, without the optimizer's work; {rate}."]
    if time.link_seconds:
        waiting = f"{waited} of waiting for collectives, which take {link} in all"
        found.append(f"Of it {_seconds(time.compute_seconds)} of computing, and {waiting}.")
    if time.moved_seconds is None:
        found.append("How long it takes to move what is offloaded is not known, and not in it.")
    elif time.moved_seconds:
        hidden = time.moved_seconds <= time.compute_seconds
        beside = "which is hidden behind the computation" if hidden else "longer than the computation takes"
        found.append(f"What is offloaded moves in {_seconds(time.moved_seconds)}, {beside}.")
    return [*found, *(f"Assumed: {one}." for one in time.assumed)]


def hiding_table(time: TimePlan) -> Table:
    """Part by part what is computed, and what is on the link beside it; equal parts are one line."""
    table = Table(title="are collectives hidden behind computation?")
    table.add_column("segments")
    for heading in ("computing", "sent meanwhile", "which takes", "hidden"):
        table.add_column(heading, justify="right")
    for run in _equal(_by_segment(time.parts)):
        first, last = run[0], run[-1]
        own = f"{first.segment}" if first is last else f"{first.segment} to {last.segment}, each"
        hidden = "yes" if first.hidden else "no"
        link = _seconds(first.link_seconds)
        cells = _seconds(first.seconds), readable(first.sent_bytes), link, hidden if first.sent_bytes else ""
        table.add_row(f"{first.phase} {own}", *cells)
    return table


def _by_segment(parts: Sequence[PartTime]) -> list[PartTime]:
    """What a segment does between its own collectives, together."""
    found = []
    for (phase, segment), run in itertools.groupby(parts, key=lambda p: (p.phase, p.segment)):
        own = list(run)
        seconds, link, waited = (
            sum(getattr(p, name) for p in own) for name in ("seconds", "link_seconds", "waited_seconds")
        )
        sent, hidden = sum(p.sent_bytes for p in own), all(p.hidden for p in own)
        found.append(PartTime(phase, segment, seconds, sent, link, waited, hidden))
    return found


def _equal(parts: Sequence[PartTime]) -> Iterator[list[PartTime]]:
    key = lambda p: (p.phase, f"{p.seconds:.6g}", p.sent_bytes)  # noqa: E731
    for _, run in itertools.groupby(parts, key=key):
        yield list(run)


def _seconds(count: float) -> str:
    """Seconds for people: "2.5 ms", "170.1 s"."""
    if count == 0:
        return "0 s"
    return f"{count:,.1f} s" if count >= 1 else f"{1e3 * count:,.3g} ms"
