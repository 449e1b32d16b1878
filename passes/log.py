"""What the passes tell the log: `TORCH_LOGS="streambp_fx.passes"`, with a `+` before it the programs too.

With `TORCH_TRACE=DIR` the programs also go to PyTorch's structured trace, which `tlparse` shows.
"""

from __future__ import annotations

import logging
from typing import Any

from torch._logging import trace_structured

from .capture import CapturedGraph
from .ir import Facts, Kind

log = logging.getLogger(__package__)


def report(name: str, result: CapturedGraph | Facts, seconds: float) -> None:
    """One line on a pass that ran: how long, and what there is now."""
    log.info("%-10s %6.2f s  %s", name, seconds, _counts(result))
    text = lambda: program_text(result)  # noqa: E731
    if log.isEnabledFor(logging.DEBUG):
        log.debug("after %s:\n%s", name, text())
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"streambp_after_{name}", "encoding": "string"},
        payload_fn=text,
    )


def _counts(result: CapturedGraph | Facts) -> str:
    nodes = list(result.module.graph.nodes)
    text = f"{sum(n.op == 'call_function' for n in nodes)} ops"
    if not isinstance(result, Facts):
        return text
    streamed = sum(k is Kind.STREAM for k in result.kinds.values())
    text += f", {streamed} streamed, {len(result.mixings)} read along the sequence"
    if result.refusals:
        text += f", {len(result.refusals)} refused"
    if result.segments:
        distinct = len({s.signature for s in result.segments if s.signature})
        text += f"; {len(result.segments)} segments" + (f", {distinct} distinct" if distinct else "")
    return text


def program_text(result: CapturedGraph | Facts) -> str:
    """The program after a pass: an op a line, with what is known about its value."""
    lines = []
    facts: Any = result if isinstance(result, Facts) else None
    borders = {s.nodes[0]: s for s in facts.segments if s.nodes} if facts is not None else {}
    for node in result.module.graph.nodes:
        if node in borders:
            lines.append(f"--- segment {borders[node].index} ({borders[node].kind})")
        notes = []
        if facts is not None and node in facts.kinds:
            layout = facts.layouts.get(node)
            notes.append(facts.kinds[node].value)
            if layout is not None and any(layout):
                notes.append("[" + ", ".join("-" if a is None else str(a) for a in layout) + "]")
            if node in facts.mixings:
                notes.append(f"reads {facts.mixings[node].reach.name}")
            if node in facts.refusals:
                notes.append(f"refused: {facts.refusals[node]}")
        lines.append(f"{node.format_node() or node.name}" + (f"  # {' '.join(notes)}" if notes else ""))
    return "\n".join(lines)
