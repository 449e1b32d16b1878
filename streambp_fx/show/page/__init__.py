"""A schedule as one HTML page that needs nothing else: no network, no other file.

chart         the memory of a step over time, by cause
lane          the communication of several devices under it
graph         the graph of segments
dependencies  which rows of a segment's input each value reads
kept          what is kept for the backward, by value and segment
programs      the printed programs, function by function
segments      the segments one by one, and the table of what is not chunked
page.html     the frame, with page.css and page.js in it
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from string import Template

from ...units import readable
from ..scheduled_step import ScheduledStep
from ..step_memory import StepMemory
from .chart import PLACES, Chart
from .graph import graph_svg, groups_of
from .kept import kept_html
from .lane import lane_html
from .programs import function_html, functions
from .segments import segments_html, unchunked_html


def page(memory: StepMemory, program: str, title: str | None = None, instructions: str = "") -> str:
    """A schedule as an HTML document.

    Args:
        memory: of the step of a schedule, which has a sequence length.
        program: the step as Python text.
        title: what it is the schedule of, a model's name say; it is escaped.
        instructions: the step as instructions.

    Raises:
        CompileError: a program cannot be traced.
    """
    schedule = memory.schedule
    chart, groups, code = Chart(memory), groups_of(schedule), functions(program)
    heading = f"Schedule of {title}" if title else "Schedule of a training step"
    rest = [f for f in code if f.segment is None]
    return Template(_resource("page.html")).substitute(
        title=escape(heading),
        style=_resource("page.css"),
        script=_resource("page.js"),
        facts=_facts(memory),
        tiles=_tiles(memory),
        sweeps=_sweeps(schedule),
        chart=chart.html(),
        lane=lane_html(memory),
        legend=chart.legend(),
        places=PLACES,
        at_peak=chart.at_peak,
        peak_place=round(PLACES * chart.middle(chart.at_peak)),
        shown=f"{len(chart.moments):,} of {len(memory.streamed):,}",
        expression=escape(str(memory.peak_expression("streamed"))),
        graph=graph_svg(schedule, groups),
        segments=segments_html(memory, groups, code),
        kept=kept_html(schedule),
        unchunked=unchunked_html(memory, groups),
        program="".join(map(function_html, rest)),
        instructions=escape(instructions),
        lines=len(instructions.splitlines()),
        data=embedded(chart.data()),
    )


def embedded(data: object) -> str:
    """JSON that can stand in a script element: no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _facts(memory: StepMemory) -> str:
    schedule = memory.schedule
    rows, loss_rows = memory.sizes.chunk, memory.sizes.loss_chunk
    length = f"{len(schedule.segments)} segments, {schedule.seq_len:,} tokens"
    return f"{length}, chunks of {rows:,} rows, loss chunks of {loss_rows:,}"


def _tiles(memory: StepMemory) -> str:
    """The figures at the top; bytes over weights, their gradients and the inputs."""
    streamed = memory.peak("streamed")
    tiles = [("streamed", "Peak, streamed", streamed, "activations, over weights and their gradients")]
    for way, name in (("checkpointing", "Peak, gradient checkpointing"), ("eager", "Peak, eager")):
        peak = memory.peak(way)
        tiles.append(
            (way, name, peak, f"{peak / streamed:,.1f} times the streamed step's" if streamed else "")
        )
    stored = memory.schedule.stored_bytes_per_row() * (memory.schedule.seq_len or 0)
    tiles.append(("stored", "Stored for the backward", stored, "the inputs of all segments"))
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd><b data-figure="{key}" data-bytes="{int(count)}">'
        f'{readable(count)}</b><span class="muted">{escape(note)}</span></dd></div>'
        for key, name, count, note in tiles
    )


def _sweeps(schedule: ScheduledStep) -> str:
    if not schedule.sweeps:
        return "The graph has no loss."
    if schedule.sweeps == 1:
        return "One sweep over the loss head: its coefficients are known before the sweep."
    return "Two sweeps over the loss head: its coefficients are known only after a first one."
