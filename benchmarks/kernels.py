"""Where the time of a step goes: kernels of attention, matrix products, and the rest.

python -m benchmarks.kernels --case long --modes streamed,streamed-attention

The steps of all modes are taken in turn in one process, under PyTorch's profiler, after one of each as
warm-up. A schedule that does the same products and the same attention cannot be faster than these two alone:
the last column is that time as a share of checkpointing's whole step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from streambp_fx.models.loading import random_tokens

from .cases import CASES, Workload
from .gpu_steps import Job, clear_gradients, make_model, make_step
from .modes import PEER
from .tables import new_table

PRODUCTS = frozenset(f"aten::{name}{end}" for name in ("mm", "addmm", "bmm", "baddbmm") for end in ("", "_"))
#: Seconds of a step: of attention kernels, of products, and of all.
Parts = tuple[float, float, float]


def make(workload: Workload, mode: str) -> Callable[[], None]:
    """A training step of a workload in the way of a mode, on weights of its own."""
    config = workload.config
    assert config is not None, "a case with a config"
    model = make_model(config, "cpu", torch.float32)
    job = Job(config, mode, chunk=workload.chunk, dtype="float32", device="cpu")
    ids = random_tokens(config["vocab_size"], workload.tokens, 0).view(1, -1)
    step = make_step(model, job)

    def run() -> None:
        clear_gradients(model)
        step(ids)

    return run


def parts(step: Callable[[], None]) -> Parts:
    """Where the time of one step goes."""
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
        seconds = time.perf_counter() - start
    attention = products = 0.0
    for event in profiler.key_averages():
        if "attention" in event.key and event.key.startswith("aten::"):
            attention += event.self_cpu_time_total
        elif event.key in PRODUCTS:
            products += event.self_cpu_time_total
    return attention / 1e6, products / 1e6, seconds


def measure(workload: Workload, modes: Sequence[str], steps: int) -> dict[str, Parts]:
    """Medians of each part, of steps taken in turn."""
    runs = {mode: make(workload, mode) for mode in modes}
    for run in runs.values():
        run()
    found: dict[str, list[Parts]] = {mode: [] for mode in modes}
    for _ in range(steps):
        for mode, run in runs.items():
            found[mode].append(parts(run))
    return {mode: tuple(map(statistics.median, zip(*all_, strict=True))) for mode, all_ in found.items()}  # type: ignore[misc]


def show(title: str, results: dict[str, Parts]) -> Any:
    """The table."""
    table = new_table(
        title, "mode", "attention s", "products s", "the rest s", "step s", "of it", "at the least"
    )
    peer = results[PEER][2]
    for mode, (attention, products, seconds) in results.items():
        rest, kernels = seconds - attention - products, attention + products
        figures = (attention, products, rest, seconds)
        table.add_row(mode, *(f"{s:.2f}" for s in figures), f"{seconds / peer:.2f}", f"{kernels / peer:.2f}")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[n for n, c in CASES.items() if c.workload.config], default="long")
    parser.add_argument("--modes", default="streamed,streamed-attention")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="an N-th of the length")
    args = parser.parse_args(argv)
    workload = CASES[args.case].workload.scaled(args.divide)
    results = measure(workload, [PEER, *args.modes.split(",")], args.steps)
    Console().print(show(workload.title, results))


if __name__ == "__main__":
    main()
