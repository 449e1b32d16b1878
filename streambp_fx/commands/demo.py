"""The demo: fine-tune a real model streamed, then measure the step against gradient checkpointing.

Each mode runs in a process of its own, on the same weights and the same batch. The streamed process
is the fine-tuning itself. In both, the peak is taken from the first step and the time from the steps
after it; see NOTE [peak and time come from different steps] in `measure.step`.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..measure.gradients import GradientDifference, largest_difference
from ..measure.step import Event, Measurement, StepSpec, run_isolated
from ..models.loading import SMOLLM2, LoadedModel, check_source, english_tokens, load_model, save_copy
from ..show.progress import every_ten_seconds

LEARNING_RATE = 5e-5
MIB = 2**20
#: Shares of one full step that the progress bar gives to the other parts of the work.
SETUP_SHARE, LOAD_SHARE = 0.7, 0.2
WARMUP_SHARE = {"streamed": 1.1, "checkpointing": 0.1}


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs; the fields are those of `StepSpec`, `model` is a source for `load_model`."""

    model: str = SMOLLM2
    seq_len: int = 3072
    chunk: int = 1024
    loss_chunk: int = 256
    steps: int = 2
    dtype: str = "float32"
    threads: int = 0


class _Reporter:
    """Progress over all processes: a bar in a terminal, elsewhere a line an event and every ten seconds."""

    def __init__(self, console: Console, total: float) -> None:
        self.console, self.total, self.done = console, total, 0.0
        self.started = time.perf_counter()
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("starting", total=total)
        self.label, self.mode, self.steps = "", "", 0
        self.lines: contextlib.AbstractContextManager[None]
        self.lines = contextlib.nullcontext() if console.is_terminal else every_ten_seconds(self._line)

    def __enter__(self) -> _Reporter:
        self.progress.start()
        self.lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.__exit__(None, None, None)
        self.progress.stop()

    def _line(self) -> None:
        """How long it has been, and how long it will be if the rest goes as what is done did."""
        seconds = time.perf_counter() - self.started
        left = seconds * (self.total - self.done) / self.done if self.done else 0.0
        about = f", about {left:.0f} s left" if left else ""
        self.console.print(f"  {self.label}: {seconds:.0f} s in all so far{about}")

    def begin(self, label: str, mode: str = "", steps: int = 0) -> None:
        """A new part of the work, of that many steps in a mode."""
        self.label, self.mode, self.steps = label, mode, steps
        self.progress.update(self.task, description=label)
        if not self.console.is_terminal:
            self.console.print(f"{label} ...")

    def advance(self, share: float) -> None:
        """That share of a step is done."""
        self.done += share
        self.progress.advance(self.task, share)

    def event(self, event: Event) -> None:
        """A message of the worker process."""
        kind = event["event"]
        if kind == "loaded":
            self.advance(LOAD_SHARE)
        elif kind == "warm":
            self.advance(WARMUP_SHARE[self.mode])
            if self.mode == "streamed":
                figures = f"{event['tokens']} tokens, loss {event['loss']:.4f}, {event['seconds']:.1f} s"
                self.console.print(f"  a first step, which is captured and compiled: {figures}")
        elif kind == "schedule":
            self.console.print(event["text"], markup=False, soft_wrap=True)
        elif kind == "note":
            self.console.print(f"note: {event['text']}", markup=False)
        elif kind == "step":
            self.advance(1)
            done = f"step {event['index'] + 1} of {self.steps}"
            figures = f"loss {event['loss']:.4f}, {event['seconds']:.1f} s"
            self.progress.update(self.task, description=f"{self.label}: {done}, {figures}")
            if not self.console.is_terminal:
                self.console.print(f"  {done}: {figures}")


def _prepare(options: DemoOptions, folder: Path) -> tuple[LoadedModel, str, Path]:
    """Load the model, write the batch and, if loading is slow, a copy that loads fast.

    Returns:
        the model, its source for the other processes, and the file with the batch.
    """
    loaded = load_model(options.model, getattr(torch, options.dtype), tokenizer=True)
    ids = english_tokens(loaded.tokenizer, options.seq_len, vocab_size=loaded.vocab_size)
    batch = folder / "batch.pt"
    torch.save(ids[None], batch)
    source = save_copy(loaded, folder / "model") if options.model == SMOLLM2 else options.model
    return loaded, source, batch


def _spec(options: DemoOptions, mode: str, source: str, batch: Path, folder: Path) -> StepSpec:
    streamed = mode == "streamed"
    # The streamed step is captured and compiled during its warm-up: a chunk with a prefix is needed too.
    warmup = options.chunk + 64 if streamed else 64
    return StepSpec(
        source=source,
        mode=mode,
        seq_len=options.seq_len,
        chunk=options.chunk,
        loss_chunk=options.loss_chunk,
        dtype=options.dtype,
        threads=options.threads,
        steps=max(2, options.steps) if streamed else 2,
        warmup_len=min(options.seq_len, warmup),
        learning_rate=LEARNING_RATE if streamed else 0.0,
        batch_file=str(batch),
        gradients_file=str(folder / f"{mode}.pt"),
    )


def _loss_table(losses: tuple[float, ...]) -> Table:
    table = Table(title="Fine-tuning, streamed", min_width=26)
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    for index, loss in enumerate(losses):
        table.add_row(str(index + 1), f"{loss:.4f}")
    return table


def _comparison_table(title: str, options: DemoOptions, plain: Measurement, streamed: Measurement) -> Table:
    table = Table(title=title)
    table.add_column("one training step")
    table.add_column("peak activation memory", justify="right")
    table.add_column("time", justify="right")
    rows = {"Hugging Face checkpointing": plain, f"streamed, chunk {options.chunk}": streamed}
    for name, m in rows.items():
        table.add_row(name, f"{m.peak_bytes / MIB:,.1f} MiB", f"{m.seconds:.3g} s")
    table.add_section()
    memory, duration = _ratios(plain, streamed)
    table.add_row("streamed against checkpointing", memory, duration)
    return table


def _ratios(plain: Measurement, streamed: Measurement) -> tuple[str, str]:
    """What streaming saves, in words, if it is more than the noise of a measurement."""
    duration = f"{streamed.seconds / plain.seconds:.2f} times as long"
    if min(plain.peak_bytes, streamed.peak_bytes) < MIB:
        return "too small to compare", duration
    ratio = plain.peak_bytes / streamed.peak_bytes
    return (f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"), duration


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured: losses of the fine-tuning, both steps, and how far their gradients differ."""

    losses: tuple[float, ...]
    checkpointing: Measurement
    streamed: Measurement
    difference: GradientDifference


def run_demo(options: DemoOptions, console: Console | None = None) -> DemoResult:
    """Run the demo and print what it finds.

    Raises:
        ModelSourceError: there is no such model.
        WorkerError: a training step failed.
    """
    check_source(options.model)
    console = console or Console(highlight=False)
    started = time.perf_counter()
    total = SETUP_SHARE + 2 * LOAD_SHARE + sum(WARMUP_SHARE.values()) + max(2, options.steps) + 2
    with tempfile.TemporaryDirectory(prefix="streambp-fx-") as name, _Reporter(console, total) as report:
        folder = Path(name)
        report.begin(f"loading {options.model}")
        with contextlib.redirect_stderr(io.StringIO()):  # loaders draw progress bars into ours
            loaded, source, batch = _prepare(options, folder)
        for note in loaded.notes:
            console.print(f"note: {note}", markup=False)
        title, text = loaded.title, "English text" if loaded.tokenizer is not None else "random tokens"
        del loaded
        report.advance(SETUP_SHARE)
        results = {}
        labels = {"streamed": "fine-tuning, streamed", "checkpointing": "the same step with checkpointing"}
        for mode, label in labels.items():
            spec = _spec(options, mode, source, batch, folder)
            report.begin(label, mode, spec.steps)
            results[mode] = run_isolated(spec, "both", report.event)
            if mode == "streamed":
                console.print(_loss_table(results[mode].losses[: options.steps]))
        difference = largest_difference(folder / "checkpointing.pt", folder / "streamed.pt")
    threads = options.threads or torch.get_num_threads()
    title = f"{title}, {options.seq_len} tokens of {text}, {options.dtype}, {threads} threads"
    console.print(_comparison_table(title, options, results["checkpointing"], results["streamed"]))
    console.print(
        f"largest relative gradient difference: {difference.relative:.1e} ({difference.parameter})\n"
        "Time is of forward and backward; peak memory is over weights and gradients.",
        markup=False,
        soft_wrap=True,
    )
    if options.seq_len < 1024:
        console.print("(so short a sequence says little about memory and time)")
    console.print(f"{time.perf_counter() - started:.0f} s in all")
    return DemoResult(
        results["streamed"].losses[: options.steps],
        results["checkpointing"],
        results["streamed"],
        difference,
    )
