"""What memory buys, as a picture: seconds (or work) of a step against the memory that it takes."""

from __future__ import annotations

from pathlib import Path

from ..plan import Plan
from ..planning.memory_and_work import WayToRun
from ..show.memory_plot import LABELS, STYLES, check_picture, figure_class, write_picture
from .plan import GIB

# Of the ways that are not streamed, in the order of `ways_to_run`.
UNSTREAMED = ("checkpointing", "eager")


def plot_frontier(plan: Plan, path: str | Path) -> None:
    """Draw the ways to run the step of a plan: ours as a line, checkpointing and eager as points.

    Args:
        plan: with `ways`.
        path: of the picture; its suffix tells the format.

    Raises:
        OutputError: matplotlib is missing, the format is unknown, or no file can be written there.
    """
    path, ways = check_picture(path), plan.ways or ()
    figure = figure_class()(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    streamed = [way for way in ways if way.streamed]
    axes.plot(*_points(streamed), marker="o", label=LABELS["streamed"], color=STYLES["streamed"]["color"])
    for name, way in zip(UNSTREAMED, (way for way in ways if not way.streamed), strict=False):
        color = STYLES[name]["color"]
        axes.plot(*_points([way]), marker="s", linestyle="none", label=LABELS[name], color=color)
    axes.set_xlabel("peak, GiB")
    timed = any(way.seconds is not None for way in ways)
    axes.set_ylabel("seconds a step, predicted" if timed else "work, of a step that recomputes nothing")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(
        f"{plan.model}, {plan.dtype}, {plan.batch_size} x {plan.seq_len:,} tokens", parse_math=False
    )
    write_picture(figure, path)


def _points(ways: list[WayToRun]) -> tuple[list[float], list[float]]:
    """Peaks in GiB, and seconds; where no device was given, work instead."""
    costs = [way.recompute_factor if way.seconds is None else way.seconds for way in ways]
    return [way.peak_bytes / GIB for way in ways], costs
