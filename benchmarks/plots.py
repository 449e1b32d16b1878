"""Results as pictures; a run without matplotlib has none, and says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import Case
from .frontier import Point
from .measuring import Result

GIB, MIB = 2**30, 2**20
ENDINGS = (".png", ".svg")
# Colours that people with colour-blindness can tell apart (Okabe and Ito).
OURS, PEERS = "#0072B2", "#B8B8B8"
MARKERS = "sD^vX*P<>"
LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def figure_of(width: float, height: float) -> Any:
    """matplotlib's figure, drawn without a display; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, endings: Sequence[str] = ENDINGS) -> list[Path]:
    """Write a figure to a path with each of the endings; what was written."""
    found = [path.with_name(path.name + ending) for ending in endings]
    for file in found:
        figure.savefig(file, dpi=150)
    return found


def draw_cases(
    groups: Sequence[tuple[Case, Sequence[Result]]], path: Path, endings: Sequence[str] = ENDINGS
) -> list[Path]:
    """Peak and time of every measured mode, one row of two panels a case.

    Args:
        path: of the pictures, without an ending.
        endings: of the pictures.

    Returns:
        what was written: nothing without matplotlib or figures.
    """
    shown = [(c, [r for r in rs if r.peak_bytes is not None or r.seconds]) for c, rs in groups]
    shown = [(c, rs) for c, rs in shown if rs]
    heights = [0.9 + 0.28 * len(rs) for _, rs in shown]
    figure = figure_of(11, sum(heights)) if shown else None
    if figure is None:
        return []
    panels = figure.subplots(len(shown), 2, squeeze=False, height_ratios=heights)
    for (case, results), (memory, time) in zip(shown, panels, strict=True):
        names = [r.mode.name for r in results]
        colours = [OURS if r.mode.ours else PEERS for r in results]
        peaks = [(r.peak_bytes or 0) / MIB for r in results]
        bars = memory.barh(names, peaks, color=colours)
        memory.bar_label(bars, [f"{p:,.0f}" for p in peaks], padding=3, fontsize=8)
        medians = [r.median or 0.0 for r in results]
        low = [m - min(r.seconds, default=m) for m, r in zip(medians, results, strict=True)]
        high = [max(r.seconds, default=m) - m for m, r in zip(medians, results, strict=True)]
        bars = time.barh(names, medians, xerr=(low, high), color=colours, ecolor="0.3", capsize=2)
        time.bar_label(bars, [f"{m:.3g}" for m in medians], padding=8, fontsize=8)
        time.set_yticklabels([])
        memory.set_title(f"{case.name}: peak, MiB over weights and gradients", fontsize=9, loc="left")
        time.set_title("seconds a step, median and range", fontsize=9, loc="left")
        for axes in (memory, time):
            axes.invert_yaxis()
            axes.margins(x=0.18)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    return save(figure, path, endings)


def draw_sweep(
    axis: str, results: Sequence[Result], size: Any, path: Path, endings: Sequence[str] = ENDINGS
) -> list[Path]:
    """Peak and time against one size, as far as they were measured, both axes logarithmic.

    Args:
        axis: the size's name.
        size: from a workload to its size.
        path: of the pictures, without an ending.
        endings: of the pictures.

    Returns:
        what was written: nothing without matplotlib or figures.
    """
    measures: dict[str, Callable[[Result], float | None]] = {
        "peak, GiB over weights and gradients": lambda r: r.peak_bytes and r.peak_bytes / GIB,
        "seconds a step": lambda r: r.median,
    }
    measures = {what: of for what, of in measures.items() if any(of(r) for r in results)}
    figure = figure_of(5 * len(measures), 4) if measures else None
    if figure is None:
        return []
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    modes = list(dict.fromkeys(r.mode.name for r in results))
    for axes, (what, of) in zip(panels, measures.items(), strict=True):
        for position, name in enumerate(modes):
            own = [r for r in results if r.mode.name == name and of(r)]
            style = {"color": LINES[position % len(LINES)], "marker": "o", "markersize": 4, "label": name}
            axes.plot([size(r.workload) for r in own], [of(r) for r in own], **style)
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=what)
        axes.grid(which="both", color="0.9")
    panels[0].legend(frameon=False, fontsize=8)
    return save(figure, path, endings)


def draw_frontier(
    title: str, points: Sequence[Point], path: Path, endings: Sequence[str] = ENDINGS
) -> list[Path]:
    """Time against peak of every point, ours as a line; nothing without matplotlib or times.

    Args:
        title: of the picture.
        points: of one workload.
        path: of the pictures, without an ending.
        endings: of the pictures.
    """
    timed = sorted((p for p in points if p.time is not None), key=lambda p: p.peak)
    figure = figure_of(8, 5) if timed else None
    if figure is None:
        return []
    axes = figure.subplots()
    own = [p for p in timed if p.result.mode.ours]
    kinds: dict[str, list[Point]] = {}
    for point in (p for p in timed if p not in own):
        kinds.setdefault(point.result.mode.name.rstrip("0123456789.-"), []).append(point)
    colours = [c for c in LINES if c != OURS]
    for position, (kind, some) in enumerate(kinds.items()):
        style = {"color": colours[position % len(colours)], "marker": MARKERS[position % len(MARKERS)]}
        axes.plot(*_peaks_and_times(some), linestyle="", label=kind, **style)
    axes.plot(*_peaks_and_times(own), color=OURS, marker="o", label="streamed, memory=")
    axes.set(xscale="log", xlabel="peak, MiB over weights and gradients", ylabel="of checkpointing's time")
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(which="both", color="0.9")
    axes.legend(frameon=False, fontsize=8)
    return save(figure, path, endings)


def _peaks_and_times(points: Sequence[Point]) -> tuple[list[float], list[float | None]]:
    return [p.peak / MIB for p in points], [p.time for p in points]


def draw_training(runs: Sequence[Any], path: Path, endings: Sequence[str] = (".png",)) -> list[Path]:
    """Losses and peaks of training runs, `trainers.Training`.

    Args:
        path: of the pictures, without an ending.
        endings: of the pictures.
    """
    figure = figure_of(10, 3.4)
    if figure is None:
        return []
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = [OURS if run.spec.mode == "streamed" else LINES[0] for run in runs]
    for run, colour in zip(runs, colours, strict=True):
        steps, ours = range(1, len(run.losses) + 1), run.spec.mode == "streamed"
        style = (
            {"marker": "o", "markersize": 4} if ours else {"marker": "x", "markersize": 9, "linestyle": ""}
        )
        losses.plot(steps, run.losses, color=colour, label=run.spec.mode, **style)
    losses.set(xlabel="optimizer step", ylabel="loss")
    losses.locator_params(axis="x", integer=True)
    losses.legend(frameon=False, fontsize=8)
    peaks = [run.peak_bytes / MIB for run in runs]
    bars = memory.barh([run.spec.mode for run in runs], peaks, color=colours)
    memory.bar_label(bars, [f"{p:,.0f}" for p in peaks], padding=3, fontsize=8)
    memory.margins(x=0.18)
    memory.set_title("peak of a step, MiB", fontsize=9, loc="left")
    for axes in (losses, memory):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, path, endings)
