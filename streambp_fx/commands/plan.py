"""`streambp-fx plan`: a plan as a table or as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from ..plan import Plan
from ..planning.memory_and_work import WayToRun
from ..units import readable
from .plan_devices import device_lines, hiding_table, time_lines, traffic_table
from .published import KINDS, PUBLISHED_MEMORY, predicted, published_for

GIB = 2**30


def print_plan(plan: Plan, as_json: bool = False, console: Console | None = None) -> None:
    """Print a plan; as JSON: one object."""
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
        return
    console = console or Console(highlight=False)
    console.print(_memory(plan))
    for line in _lines(plan):
        console.print(line, markup=False, soft_wrap=True)
    if plan.memory_bytes is not None:
        console.print(_lengths(plan))
    if plan.ways is not None:
        console.print(_ways(plan.ways))
    if plan.devices is not None:
        for line in device_lines(plan.devices):
            console.print(line, markup=False, soft_wrap=True)
        console.print(traffic_table(plan.devices))
    if plan.time is not None:
        for line in time_lines(plan.time):
            console.print(line, markup=False, soft_wrap=True)
        if plan.devices is not None:
            console.print(hiding_table(plan.time))


def _memory(plan: Plan) -> Table:
    title = f"{plan.model}, {plan.dtype}, {plan.batch_size} x {plan.seq_len:,} tokens, chunk {plan.chunk}"
    table = Table(title=title)
    table.add_column("memory for")
    table.add_column("GiB, predicted", justify="right")
    resident = {
        "weights": plan.weights_bytes,
        "gradients": plan.gradients_bytes,
        "optimizer states": plan.optimizer_bytes,
    }
    for name, count in {**resident, **plan.by_cause}.items():
        if count:
            table.add_row(name, f"{count / GIB:,.2f}")
    table.add_section()
    table.add_row("peak", f"{plan.peak_bytes / GIB:,.2f}")
    return table


def _lines(plan: Plan) -> list[str]:
    lines = []
    if plan.memory_bytes is not None:
        fits = "fits" if plan.fits else "does NOT fit"
        lines.append(f"{plan.seq_len:,} tokens: {fits} in {plan.memory_bytes / GIB:,.1f} GiB.")
        lines.append(
            f"Longest sequence: {plan.max_seq_len:,} tokens, as predicted; each further GiB buys "
            f"{plan.tokens_per_gib:,}."
        )
    lines.append(f"Memory policy: {plan.policy}{_elsewhere(plan)}.")
    lines.append(
        f"Work of a step: {plan.flops / 1e12:,.1f} TFLOP, {plan.recompute_factor:.2f} of a step that "
        "recomputes nothing."
    )
    longest = max(plan.seq_len, plan.max_seq_len or 0)
    if plan.positions is not None and longest > plan.positions:
        lines.append(
            f"The model's config has {plan.positions:,} positions (max_position_embeddings): it was not "
            "trained beyond them."
        )
    return lines


def _elsewhere(plan: Plan) -> str:
    if not plan.offloaded_bytes:
        return ""
    moved = f"{readable(plan.out_bytes)} go there and {readable(plan.back_bytes)} come back in a step"
    return f"; {readable(plan.offloaded_bytes)} lie there meanwhile, {moved}"


def _ways(ways: tuple[WayToRun, ...]) -> Table:
    table = Table(title="what memory buys")
    table.add_column("")
    table.add_column("peak, GiB", justify="right")
    table.add_column("work", justify="right")
    if any(way.seconds is not None for way in ways):
        table.add_column("s a step, predicted", justify="right")
    for way in ways:
        words = way.what.removeprefix("store ").split(";")[0] if way.streamed else way.what
        seconds = [] if way.seconds is None else [f"{way.seconds:,.3g}"]  # of all ways, or of none
        table.add_row(words, f"{way.peak_bytes / GIB:,.2f}", f"{way.recompute_factor:.3f}", *seconds)
    return table


def _lengths(plan: Plan) -> Table:
    table = Table(title="longest sequence, tokens")
    table.add_column("")
    table.add_column("predicted", justify="right")
    published = published_for(plan.model) if plan.devices is None else None  # they are for one device
    if published is not None:
        table.add_column(f"published, {PUBLISHED_MEMORY}", justify="right")
    for position, (name, tokens) in enumerate(zip(KINDS, predicted(plan), strict=True)):
        row = [name, f"{tokens:,}" if tokens else "none"]
        table.add_row(*row, *([f"{published.tokens[position]:,}"] if published is not None else []))
    return table
