"""What `gpu.py` found, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .modes import PEER
from .tables import new_table, number, yes_or_no

GIB = 2**30
#: Goals: time against checkpointing from this length on, and times as long as the peers of the same kind.
TIME_FROM, TIME_GOAL, LONGEST_GOAL = 32768, 0.9, 5.0
#: Whose longest sequence a mode of ours is compared with: the first of them that was measured.
LONGEST_PEERS = {
    "streamed-host": ("checkpointing-offload-fused-loss", "checkpointing-offload-chunked-loss"),
}


def gpu_tables(found: Sequence[Any], memory: str) -> list[Table]:
    """Exactness, figures by length, and longest sequences; `found` are `gpu.Found`."""
    exact = next((f for f in found if f.mode == "exactness"), None)
    modes = [f for f in found if f.mode != "exactness"]
    kernels = [_kernels(f.mode, e) for f in modes for e in f.kernels]
    tables = [_lengths(modes), _longest(modes, memory), *kernels]
    return tables if exact is None else [_exactness(exact), *tables]


def _exactness(found: Any) -> Table:
    table = new_table(
        f"Gradients against eager in float32, {found.exact.get('tokens', 0):,} tokens",
        "step",
        "loss",
        "worst error",
    )
    for key, value in found.exact.items():
        if isinstance(value, dict) and "reason" in value:
            table.add_row(key, "-", value["reason"])
        elif isinstance(value, dict):
            table.add_row(key, f"{value['loss']:.6g}", f"{value['gradient_error']:.2e}")
    if found.reason:
        table.add_row("", "", found.reason)
    table.caption = "relative L2 error of the worst parameter's gradient"
    table.caption_justify = "left"
    return table


def _lengths(modes: Sequence[Any]) -> Table:
    table = new_table(
        "One step", "mode", "tokens", "peak GiB", "times less", "step s", "spread", "of it", "goal", ""
    )
    peers = {e["tokens"]: e for f in modes if f.mode == PEER for e in f.lengths if "median" in e}
    for f in modes:
        for e in f.lengths:
            peer = peers.get(e["tokens"], {})
            seconds = e.get("seconds") or []
            share = e["median"] / peer["median"] if "median" in e and peer else None
            less = peer["peak_bytes"] / e["peak_bytes"] if e.get("peak_bytes") and peer else None
            goal = share <= TIME_GOAL if share and e["tokens"] >= TIME_FROM else None
            table.add_row(
                f.mode,
                f"{e['tokens']:,}",
                number(e.get("peak_bytes") and e["peak_bytes"] / GIB),
                number(less, ".2f", "x"),
                number(e.get("median"), ".3f"),
                number((max(seconds) - min(seconds)) / e["median"] if seconds else None, ".0%"),
                number(share),
                yes_or_no(goal) if f.mode.startswith("streamed") else "-",
                e.get("reason", ""),
            )
        if f.reason:
            table.add_row(f.mode, *["-"] * 7, f.reason)
    table.caption = f"goal: at most {TIME_GOAL} of checkpointing's time from {TIME_FROM:,} tokens on"
    table.caption_justify = "left"
    return table


def _kernels(mode: str, event: dict[str, Any]) -> Table:
    title = f"{mode}, {event['tokens']:,} tokens: {event['milliseconds']:.0f} ms in kernels"
    table = new_table(title, "kernel", "calls", "ms")
    for name, calls, milliseconds in event["rows"]:
        table.add_row(name, f"{calls:,}", f"{milliseconds:.1f}")
    return table


def _reached(ratio: float | None, longest: dict[str, Any]) -> str:
    """A verdict; none where a longer sequence might have fitted."""
    if ratio is None or (ratio < LONGEST_GOAL and longest.get("too_many") is None):
        return "-"
    return yes_or_no(ratio >= LONGEST_GOAL)


def _longest(modes: Sequence[Any], memory: str) -> Table:
    title = f"Longest sequence in {memory} over weights and gradients"
    table = new_table(title, "mode", "tokens", "too many", "times", "against", "goal", "")
    tokens = {f.mode: f.longest.get("tokens") for f in modes if f.longest}
    for f in modes:
        if not f.longest:
            continue
        candidates = (*LONGEST_PEERS.get(f.mode, ()), PEER)
        against = next((p for p in candidates if tokens.get(p)), None)
        ratio = tokens[f.mode] / tokens[against] if against else None
        ours = f.mode.startswith("streamed")
        table.add_row(
            f.mode,
            f"{tokens[f.mode]:,}",
            number(f.longest.get("too_many"), ",d"),
            number(ratio, ".1f", "x"),
            against or "-",
            _reached(ratio, f.longest) if ours else "-",
            f.longest["reason"],
        )
    table.caption = f"goal: at least {LONGEST_GOAL:.0f} times; where nothing was too many, at least so long"
    table.caption_justify = "left"
    return table
