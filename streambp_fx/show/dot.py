"""The segment graph in the language of Graphviz."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.fx import Node

from ..passes.graph.sources import path, source_line
from ..passes.graph.subgraph import made_of
from ..passes.s3_cut.alive_bytes import row_bytes

if TYPE_CHECKING:
    from .scheduled_segment import ScheduledSegment
    from .scheduled_step import ScheduledStep

WHOLE = 'style="dashed", color="firebrick"'


def dot(schedule: ScheduledStep) -> str:
    """Graphviz text: segments as boxes, what flows between them as edges with bytes a row of the batch.

    The carried state of a segment is an edge to itself. What runs unchunked is dashed, with its reason.
    """
    facts = schedule.facts
    made = {n: f"segment_{s.index}" for s in facts.segments for n in s.outputs}
    lines = ['digraph "schedule" {', '  rankdir="TB";', '  node [shape="box", fontname="monospace"];']
    lines.append('  inputs [shape="plaintext"];')
    for segment in schedule.segments:
        lines.append(f"  segment_{segment.index} [{_box(segment)}];")
        lines += _edges(schedule, segment, made)
    output = next(n for n in facts.nodes if n.op == "output")
    lines.append('  outputs [shape="plaintext"];')
    lines += [
        f"  {made[n]} -> outputs [{_label(schedule, n)}];" for n in _last(schedule, output) if n in made
    ]
    return "\n".join([*lines, "}"])


def _box(segment: ScheduledSegment) -> str:
    title = f"segment {segment.index}: {segment.kind}, {len(segment.nodes)} ops"
    if segment.chunked and segment.kind != "unchunked":
        return f'label="{title}"'
    where = f"\n{source_line(segment.refused)}" if segment.refused is not None else ""
    reason = f"\nruns unchunked: {segment.reason}{where}" if segment.reason else "\nruns unchunked"
    return f'label="{_quoted(title + reason)}", {WHOLE}'


def _edges(schedule: ScheduledStep, segment: ScheduledSegment, made: dict[Node, str]) -> Iterator[str]:
    own = f"segment_{segment.index}"
    sources = [*segment.rows, *(n for n in segment.constants if n in made)]
    for node in sources:
        yield f"  {made.get(node, 'inputs')} -> {own} [{_label(schedule, node)}];"
    if not any(n in made for n in sources) and not segment.rows:
        yield f"  inputs -> {own};"
    state = schedule.state_bytes_per_row(segment)
    if state:
        yield f'  {own} -> {own} [label="state\\n{_bytes(state)}"];'


def _label(schedule: ScheduledStep, node: Node) -> str:
    name = path(node) if node.op == "placeholder" else node.name
    size = row_bytes(schedule.facts, node)
    return f'label="{_quoted(name)}' + ("" if math.isinf(size) else f"\\n{_bytes(size)}") + '"'


def _last(schedule: ScheduledStep, output: Node) -> list[Node]:
    """Values of segments that the outputs are made of without a segment between."""
    made = {n for s in schedule.segments for n in s.outputs}
    seen = made_of(output.all_input_nodes, made.__contains__)
    return [n for s in schedule.segments for n in s.outputs if n in seen]


def _bytes(count: float) -> str:
    return f"{count:,.0f} bytes a row"


def _quoted(text: str) -> str:
    """Text for a quoted string of Graphviz."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
