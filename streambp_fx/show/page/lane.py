"""The lane of communication under the timeline: what several devices gather and sum, and when."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...passes.s6_schedule.collectives import CollectiveKind
from ...units import readable
from ..collectives_text import collective_lines
from ..communication import Bar, bars
from ..step_memory import StepMemory

# The drawing is as wide as that of the timeline; its middle is the line between gathers and sums.
WIDTH, HEIGHT, MIDDLE, BAR = 1000, 200, 100, 4


def lane_html(memory: StepMemory) -> str:
    """The lane and what is said of it; "" if the step has no collectives."""
    found = bars(memory)
    if not found:
        return ""
    top = max(bar.bytes for bar in found)
    drawn = "".join(_bar(bar, top) for bar in found)
    lines = collective_lines(memory.streamed)
    return (
        '<div class="lane" id="lane"><div class="y"><span>gathered</span><span>summed</span></div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="communication over the step">{drawn}'
        f'<path class="middle" d="M0 {MIDDLE}H{WIDTH}"/></svg></div>'
        f'<p class="muted lane-caption">Communication: {escape(_summary(found))}. A bar is as high as its '
        f"bytes, of all devices together; the highest stands for {readable(top)}.</p>"
        f"<details><summary>Collectives in order</summary>"
        f'<pre class="collectives" tabindex="0"><code>{escape(chr(10).join(lines))}</code></pre></details>'
    )


def _bar(bar: Bar, top: int) -> str:
    height = max(2, round(MIDDLE * bar.bytes / top))
    left = min(bar.start * WIDTH, WIDTH - BAR)
    y = MIDDLE - height if bar.gathers else MIDDLE
    way = "gathers" if bar.gathers else "sums"
    said = "; ".join(f"{c.kind.value} of {c.name}: {readable(c.bytes)}" for c in bar.collectives)
    place = f'x="{left:.1f}" y="{y}" width="{BAR}" height="{height}"'
    counts = f'data-bytes="{bar.bytes}" data-count="{len(bar.collectives)}"'
    return f'<rect class="{way}" {place} {counts}><title>{escape(said)}</title></rect>'


def _summary(found: list[Bar]) -> str:
    return ", ".join(_counts(found)) + f", between {found[0].collectives[0].devices} devices"


def _counts(found: list[Bar]) -> Iterator[str]:
    for kind in CollectiveKind:
        own = [c for bar in found for c in bar.collectives if c.kind is kind]
        several = "s" if len(own) > 1 else ""
        if own:
            yield f"{len(own)} {kind.value}{several} of {readable(sum(c.bytes for c in own))}"
