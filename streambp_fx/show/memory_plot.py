"""The picture of a schedule's memory: one step over time, and the peak against the sequence length."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..errors import OutputError
from ..units import readable
from .communication import Bar, bars
from .scheduled_step import ScheduledStep
from .step_memory import WAYS, StepMemory, drawn, thinned
from .whole_files import check_writable, write_whole

FORMATS = (".png", ".svg", ".pdf")
# Colours that people with colour-blindness can tell apart (Okabe and Ito), and line styles for print in grey.
STYLES: dict[str, dict[str, Any]] = {
    "eager": {"color": "#D55E00", "linestyle": (0, (1, 1.2))},
    "checkpointing": {"color": "#CC79A7", "linestyle": (0, (5, 2))},
    "streamed": {"color": "#0072B2", "linestyle": "-"},
}
LABELS = {"eager": "eager", "checkpointing": "gradient checkpointing", "streamed": "streamed"}
BINS = 600


def plot_memory(schedule: ScheduledStep, path: str | Path, title: str | None = None) -> None:
    """Draw the memory of a step, see `Schedule.plot_memory`."""
    path = check_picture(path)
    memory = StepMemory.of(schedule)
    figure, found = figure_class()(figsize=(11, 5), layout="constrained"), bars(memory)
    if found:
        places = figure.add_gridspec(2, 2, height_ratios=[4, 1])
        over_time, by_length = figure.add_subplot(places[0, 0]), figure.add_subplot(places[:, 1])
        _draw_communication(figure.add_subplot(places[1, 0], sharex=over_time), found)
    else:
        over_time, by_length = figure.subplots(1, 2)
    _draw_step(over_time, memory)
    if found:
        over_time.set_xlabel("")
        over_time.tick_params(labelbottom=False)
    _draw_lengths(by_length, memory)
    lines = dict(zip(WAYS, over_time.get_lines(), strict=False))
    labels = [f"{LABELS[way]}: peak {readable(memory.peak(way))}" for way in lines]
    figure.legend(lines.values(), labels, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(f"Predicted activation memory: {title or 'a training step'}", parse_math=False)
    write_picture(figure, path)


def write_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib's to a file, whole or not at all; its suffix tells the format.

    Raises:
        OutputError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    write_whole(path, drawn.getvalue())


def check_picture(path: str | Path) -> Path:
    """The path, if a picture can be drawn and written there; for a check before long work.

    Raises:
        OutputError: matplotlib is missing, the format is unknown, or no file can be written there.
    """
    figure_class()
    path = check_writable(path)
    if path.suffix.lower() not in FORMATS:
        raise OutputError(f"cannot draw {path.name}: its name must end in {', '.join(FORMATS)}")
    return path


def figure_class() -> Any:
    """matplotlib's figure; it draws without a display and without pyplot's global state.

    Raises:
        OutputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OutputError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure


def _draw_step(axes: Any, memory: StepMemory) -> None:
    """One step over time, on a logarithmic scale: the streamed step is often many times below the others."""
    for way in WAYS:
        own: list[Any] = getattr(memory, way)
        shown = drawn(own)
        starts, moments = [memory.starts(way)[k] for k in shown], [own[k] for k in shown]
        kept = thinned(starts, [int(m.total) for m in moments], BINS)
        x, y = [starts[k] for k in kept] + [1.0], [float(moments[k].total) for k in kept]
        axes.step(x, [*y, y[-1]], where="post", linewidth=1.6, **STYLES[way])
    turn = min((s for (phase, _), (s, _) in memory.slots.items() if phase == "backward"), default=1.0)
    axes.axvline(turn, color="0.4", linewidth=0.8)
    for place, word in ((turn / 2, "forward"), ((1 + turn) / 2, "backward")):
        axes.text(
            place, 0.985, word, transform=axes.get_xaxis_transform(), ha="center", va="top", color="0.3"
        )
    tokens = memory.schedule.seq_len
    axes.set(title=f"One step of {tokens:,} tokens", xlabel="progress through the step", xlim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    _bytes_axis(axes, memory.peak("streamed") / 16, 2.5 * max(memory.peak(w) for w in WAYS))


def _draw_communication(axes: Any, found: list[Bar]) -> None:
    """What several devices gather (up) and sum (down), in its place on the time axis of the step."""
    for gathers, color in ((True, "#0072B2"), (False, "#D55E00")):
        own = [bar for bar in found if bar.gathers is gathers]
        heights = [bar.bytes if gathers else -bar.bytes for bar in own]
        axes.bar([bar.start for bar in own], heights, width=0.004, align="edge", color=color)
    top = max(bar.bytes for bar in found)
    axes.axhline(0, color="0.4", linewidth=0.8)
    axes.set_ylim(-1.1 * top, 1.1 * top)
    axes.set_yticks([-top, 0, top], [_tick(top), "0", _tick(top)])
    axes.set_ylabel("summed | gathered", fontsize=8)
    axes.set_xlabel("progress through the step")


def _draw_lengths(axes: Any, memory: StepMemory) -> None:
    """Peaks at lengths around that of the schedule, from the expressions."""
    tokens = memory.schedule.seq_len or 2
    lengths = _lengths(tokens)
    peaks = []
    for way in WAYS:
        peak = memory.peak_by_length(way)
        values = [float(peak(n)) for n in lengths]
        peaks += values
        axes.plot(lengths, values, linewidth=1.6, **STYLES[way])
    axes.axvline(tokens, color="0.4", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0], lengths[-1])
    axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))
    sizes = f"chunk {memory.sizes.chunk:,}, loss chunk {memory.sizes.loss_chunk:,}"
    axes.set(title="Peak against sequence length", xlabel=f"tokens of a sequence ({sizes})")
    _bytes_axis(axes, min(peaks) / 1.5, max(peaks) * 1.5)


def _lengths(tokens: int) -> list[int]:
    """Lengths from an eighth to eight times a length, evenly on a logarithmic scale."""
    found = {max(2, round(tokens * 2 ** (k / 8))) for k in range(-24, 25)}
    return sorted(found)


def _bytes_axis(axes: Any, low: float, top: float) -> None:
    """A logarithmic axis of bytes, with ticks at powers of two."""
    axes.set_yscale("log", base=2)
    axes.set_ylim(max(low, 1.0), max(top, 2.0))
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.minorticks_off()
    axes.grid(True, axis="y", color="0.9", linewidth=0.6)
    axes.set_ylabel("bytes over weights and gradients")


def _tick(count: float) -> str:
    number, _, unit = readable(count).partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}"


def _thousands(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"
