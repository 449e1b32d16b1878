"""Memory over one training step, as a picture: eager, checkpointing, and streamed.

    python -m benchmarks.step_picture PATH [--tokens N] [--chunk N]

The model is that of the case "dense". Bytes of tensors over weights and gradients are counted op by op, after
a first step that compiles; the time of each op is that of this machine. PATH gets the endings .svg and .png.
The colours can be read on white and on black.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from streambp_fx.measure.live_bytes import LiveBytes
from streambp_fx.measure.step import StepSpec
from streambp_fx.measure.worker import build_step
from streambp_fx.models.loading import random_tokens

from .cases import CONFIGS
from .gpu_steps import clear_gradients, make_model
from .plots import LINES, MIB, figure_of, save

LABELS = {
    "eager": "eager",
    "checkpointing": "Hugging Face checkpointing",
    "streamed": "streamed",
}
COLOURS = {"eager": "#8C959F", "checkpointing": LINES[0], "streamed": "#2F81F7"}
INK = "#7D8590"
#: Points of a line: of each stretch of the step the moment at which most is held.
POINTS = 600


class Course(LiveBytes):
    """Live bytes after each op of a step.

    Attributes:
        moments: seconds since the start, and bytes.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__(known)
        self.started = time.perf_counter()
        self.moments: list[tuple[float, int]] = [(0.0, 0)]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.moments.append((time.perf_counter() - self.started, self.live))
        return found


def course(mode: str, tokens: int, chunk: int) -> list[tuple[float, float]]:
    """A step in the way of a mode: shares of its time, from 0 to 1, and MiB."""
    model = make_model({**CONFIGS["qwen3"], "num_hidden_layers": 4}, "cpu", torch.float32)
    clear_gradients(model)
    step = build_step(model, StepSpec("given", mode, tokens, chunk, loss_chunk=None))
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    ids = random_tokens(vocabulary, tokens).view(1, tokens)
    step(ids)
    clear_gradients(model)
    gc.collect()
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    with Course([*known, *model.buffers(), ids]) as found:
        step(ids)
    return thinned(found.moments)


def thinned(moments: Sequence[tuple[float, int]], points: int = POINTS) -> list[tuple[float, float]]:
    """Of each of `points` equal stretches of time the most that is held, in MiB, by the share of the time."""
    whole = moments[-1][0]
    most: dict[int, int] = {}
    for seconds, held in moments:
        stretch = min(points - 1, int(points * seconds / whole))
        most[stretch] = max(most.get(stretch, 0), held)
    return [((stretch + 0.5) / points, held / MIB) for stretch, held in sorted(most.items())]


def draw(courses: dict[str, list[tuple[float, float]]], title: str, path: Path) -> list[Path]:
    """The courses by mode, one over the other; what was written, nothing without matplotlib."""
    figure = figure_of(6, 3.2)  # small, so that its letters can be read on a telephone
    if figure is None:
        return []
    axes = figure.subplots()
    for line, (mode, moments) in enumerate(courses.items()):
        shares, held = zip(*moments, strict=True)
        percent = [100 * share for share in shares]
        axes.plot(percent, held, color=COLOURS[mode], linewidth=1.4, drawstyle="steps-post")
        axes.fill_between(percent, held, color=COLOURS[mode], alpha=0.25, linewidth=0, step="post")
        said, at = f"{LABELS[mode]}: {max(held):,.0f} MiB", (1.0, 0.97 - 0.1 * line)
        axes.annotate(
            said, at, xycoords="axes fraction", ha="right", va="top", color=COLOURS[mode], fontsize=12
        )
    axes.set_xlabel("share of the step, %", color=INK, fontsize=11)
    axes.set_ylabel("MiB", color=INK, fontsize=11)
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    highest = max(mib for moments in courses.values() for _, mib in moments)
    axes.set(xlim=(0, 100), ylim=(0, 1.45 * highest))  # what is said stands above the courses
    axes.tick_params(colors=INK, labelsize=11)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_picture", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="of the pictures, without an ending")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--chunk", type=int, default=512, metavar="N")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    courses = {}
    for mode in LABELS:
        courses[mode] = course(mode, args.tokens, args.chunk)
        console.print(f"{LABELS[mode]}: {max(held for _, held in courses[mode]):,.0f} MiB")
    title = f"Live tensors over a training step of {args.tokens:,} tokens"
    written = draw(courses, title, args.path)
    if not written:
        console.print("matplotlib is not installed: no picture (pip install matplotlib)")
    for file in written:
        console.print(str(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
