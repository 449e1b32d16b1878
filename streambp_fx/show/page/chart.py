"""The memory timeline of a step as inline SVG, and the data that its tooltip reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from ...cost.held_bytes import CAUSES
from ...units import readable
from ..step_memory import StepMemory, drawn, thinned

# The drawing is stretched to its place on the page; all words beside it are HTML.
WIDTH, HEIGHT, BINS = 1000, 1000, 360
PLACES = 1000  # of the slider, along the axis
# A line of an unstreamed peak is drawn on the scale of the streamed step up to this many times its peak.
SAME_SCALE = 1.3
TITLES = {"eager": "eager", "checkpointing": "gradient checkpointing"}


@dataclass(frozen=True)
class Scale:
    """The y axis: from 0 to `top` bytes, with a tick every `step` bytes."""

    top: float
    step: int

    @staticmethod
    def up_to(largest: float) -> Scale:
        """A scale with four to nine ticks, each a round number of its unit."""
        unit = 1024 ** max(0, int(math.log(max(largest, 1), 1024)))
        for power in range(-2, 4):
            for digit in (1, 2, 5):
                step = digit * 10.0**power * unit
                if largest / step <= 8:
                    return Scale(largest * 1.06, max(1, round(step)))
        raise AssertionError("a thousand of any unit is one of the next")

    def ticks(self) -> Iterator[tuple[int, float]]:
        """Bytes of each tick, and its height in percent."""
        for k in range(int(self.top / self.step) + 1):
            yield k * self.step, 100 * k * self.step / self.top


class Chart:
    """Stacked areas by cause over one step, their moments, and lines of unstreamed peaks."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self.peak = memory.peak("streamed")
        self.unstreamed = {way: memory.peak(way) for way in ("checkpointing", "eager")}
        near = [p for p in self.unstreamed.values() if p <= SAME_SCALE * self.peak]
        self.scale = Scale.up_to(max([self.peak, *near]))
        shown, starts = drawn(memory.streamed), memory.starts("streamed")
        totals = [int(memory.streamed[k].total) for k in shown]
        kept = [shown[k] for k in thinned([starts[k] for k in shown], totals, BINS)]
        self.starts = [starts[k] for k in kept]
        self.moments = [memory.streamed[k] for k in kept]
        self.causes = [c for c in CAUSES if any(m.bytes.get(c) for m in memory.streamed)]

    @property
    def at_peak(self) -> int:
        """The index of the moment at which most is held."""
        return max(range(len(self.moments)), key=lambda k: self.moments[k].total)

    def middle(self, moment: int) -> float:
        """Where a moment is, as a fraction of the axis: the middle of what it takes of it."""
        return (self.starts[moment] + [*self.starts, 1.0][moment + 1]) / 2

    # ---- the drawing

    def svg(self) -> str:
        """The areas: the highest is drawn first and the lower ones over it."""
        areas, totals = [], [0] * len(self.moments)
        for cause in self.causes:
            totals = [t + int(m.bytes.get(cause, 0)) for t, m in zip(totals, self.moments, strict=True)]
            areas.append(f'<path class="area {name_of(cause)}" d="{self._outline(totals)}"/>')
        return (
            f'<svg class="areas" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
            f'aria-hidden="true">'
            f"{self._borders()}{''.join(reversed(areas))}{self._lines()}</svg>"
        )

    def _outline(self, totals: list[int]) -> str:
        parts, last = [f"M0 {HEIGHT}"], None
        for start, total in zip(self.starts, totals, strict=True):
            height = round(HEIGHT * (1 - total / self.scale.top))
            if height != last:
                parts.append(f"H{start * WIDTH:.1f}V{height}")
                last = height
        return "".join([*parts, f"H{WIDTH}V{HEIGHT}Z"])

    def _borders(self) -> str:
        edges = sorted({start for start, _ in self.memory.slots.values()} - {0.0})
        return f'<path class="borders" d="{"".join(f"M{e * WIDTH:.1f} 0V{HEIGHT}" for e in edges)}"/>'

    def _lines(self) -> str:
        heights = (HEIGHT * (1 - p / self.scale.top) for _, p in self.lines_on_scale())
        return "".join(f'<path class="other" d="M0 {h:.0f}H{WIDTH}"/>' for h in heights)

    def lines_on_scale(self) -> list[tuple[str, int]]:
        """Unstreamed peaks that fit the scale of the streamed step."""
        return [(way, p) for way, p in self.unstreamed.items() if p <= self.scale.top]

    # ---- what stands beside it

    def html(self) -> str:
        """The whole figure."""
        turn = 100 * min(
            (s for (phase, _), (s, _) in self.memory.slots.items() if phase == "backward"), default=1
        )
        ticks = "".join(
            f'<span class="tick" style="bottom:{height:.2f}%">{readable_tick(count)}</span>'
            for count, height in self.scale.ticks()
        )
        on_scale = "".join(
            f'<span class="other-label" style="bottom:{100 * p / self.scale.top:.2f}%">'
            f"{self._label(way, p)}</span>"
            for way, p in self.lines_on_scale()
        )
        return (
            f'{self._cut()}<div class="plot" id="plot"><div class="y">{ticks}</div>'
            f'<div class="canvas" id="canvas">{self.svg()}{on_scale}'
            f'<span class="turn" style="left:{turn:.2f}%"></span>'
            f'<span id="cursor" style="left:{100 * self.middle(self.at_peak):.2f}%"></span>'
            '<div id="tooltip" hidden></div></div></div>'
            f'<div class="x"><span style="width:{turn:.2f}%">forward →</span><span>backward →</span></div>'
        )

    def _cut(self) -> str:
        """Peaks far above the scale, over a cut in the axis, the greatest on top."""
        shown = {way for way, _ in self.lines_on_scale()}
        far = sorted(((p, w) for w, p in self.unstreamed.items() if w not in shown), reverse=True)
        if not far:
            return ""
        lines = "".join(f'<div class="far">{self._label(way, peak)}</div>' for peak, way in far)
        return f'<div class="cut" aria-label="peaks above the scale">{lines}<div class="zigzag"></div></div>'

    def _label(self, way: str, peak: int) -> str:
        times = f" ({peak / self.peak:,.1f} times)" if self.peak else ""
        return f"{TITLES[way]}: peak {readable(peak)}{times}"

    def legend(self) -> str:
        """Causes with their bytes at the peak, from the top of the picture to its bottom."""
        peak = max(self.memory.streamed, key=lambda m: m.total)
        rows = "".join(
            f'<tr><td><span class="swatch {name_of(c)}"></span>{escape(c)}</td>'
            f'<td class="number" data-cause="{escape(c)}" data-bytes="{int(peak.bytes.get(c, 0))}">'
            f"{readable(peak.bytes.get(c, 0))}</td></tr>"
            for c in reversed(self.causes)
        )
        where = f"{peak.phase}, segment {peak.segment}" + (
            "" if peak.chunk is None else f", chunk {peak.chunk}"
        )
        return (
            f'<table class="legend"><caption>At the peak ({where})</caption><tbody>{rows}</tbody>'
            f'<tfoot><tr><th scope="row">total</th><td class="number" data-bytes="{self.peak}">'
            f"{readable(self.peak)}</td></tr></tfoot></table>"
        )

    def data(self) -> dict[str, Any]:
        """What the tooltip shows: the moments that are drawn, by columns; bytes as exact integers."""
        moments = self.moments
        return {
            "causes": self.causes,
            "classes": [name_of(c) for c in self.causes],
            "start": [round(s, 6) for s in self.starts],
            "phase": [m.phase for m in moments],
            "segment": [m.segment for m in moments],
            "chunk": [m.chunk for m in moments],
            "program": [m.program for m in moments],
            "bytes": [[int(m.bytes.get(c, 0)) for c in self.causes] for m in moments],
        }


def name_of(cause: str) -> str:
    """The class of a cause in the style sheet."""
    return "cause-" + cause.replace(" ", "-")


def readable_tick(count: int) -> str:
    """A tick's label, without decimals that say nothing: "5 GiB", "0.5 MiB"."""
    number, _, unit = readable(count).partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}" if count else "0"
