"""One GPU in minutes: exactness, peak and time by length, and the longest sequence; see gpu.sh.

The model has the sizes of Qwen3-8B, or those of another case, cut to some layers. Every mode runs in a
process of its own, within its share of the time. The search for the longest sequence lends each mode the same
memory over weights and gradients, less than the device has: with all of it, one step would take longer than
the whole run may.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from streambp_fx.units import parse_bytes

from .gpu_models import CASES, TINY
from .gpu_steps import Job, as_json, run
from .gpu_tables import gpu_tables
from .modes import MODES, Setup, environment

LENGTHS = (8192, 16384, 32768, 65536, 131072, 262144)
LAYERS = 8
#: In order of interest: time may run out.
ORDER = (
    "checkpointing",
    "streamed",
    "checkpointing-offload-chunked-loss",
    "streamed-host",
    "streamed-attention",
    "streamed-flash",
    "checkpointing-offload",
    "liger",
    "checkpointing-chunked-loss",
    "checkpointing-fused-loss",
    "checkpointing-offload-fused-loss",
    "streamed-inductor",
)
#: Seconds that the comparison of gradients takes: four steps are compiled. With 60 it did not end (H100).
EXACTNESS = 120.0
#: Its vocabulary: the logits of the real one would take most of the time.
EXACTNESS_WORDS = 8192
#: Seconds for a process to end by itself after its share of the time.
GRACE = 10.0


def parser() -> argparse.ArgumentParser:
    """All arguments."""
    made = argparse.ArgumentParser(prog="benchmarks/gpu.sh OUT", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    made.add_argument("--out", type=Path, required=True, help=argparse.SUPPRESS)
    made.add_argument("--tiny", action="store_true", help="toy sizes on a CPU, all in this process")
    made.add_argument("--minutes", type=float, default=8.5, metavar="N", help="for everything (8.5)")
    made.add_argument(
        "--case", choices=sorted(CASES), default="dense", help="the model (dense: Qwen3-8B's sizes)"
    )
    made.add_argument("--layers", type=int, metavar="N", help=f"of the model ({LAYERS}, or what fits)")
    made.add_argument(
        "--chunk",
        type=lambda given: given if given == "auto" else int(given),
        default=2048,
        metavar="N",
        help='rows of a chunk, or "auto" (2048)',
    )
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the steps")
    made.add_argument("--modes", metavar="A,B", help="modes in order")
    made.add_argument("--lengths", metavar="A,B", help="tokens of the steps that are measured")
    made.add_argument("--loss-chunk", type=int, metavar="N", help="rows of a loss chunk of ours (chosen)")
    made.add_argument("--profile", action="store_true", help="also list the kernels of a step at each length")
    made.add_argument("--skip", default="", metavar="A,B", help="leave out: exactness, longest")
    made.add_argument(
        "--memory", default="16GiB", metavar="SIZE", help="of the search for the longest (16GiB)"
    )
    return made


def layers_that_fit(config: dict[str, Any], memory: int, most: int = LAYERS) -> int:
    """Layers whose weights and gradients, of two bytes, take at most half of `memory` bytes; one or more."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    state = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * heads + 2 * hidden * state + 3 * hidden * config["intermediate_size"]
    ends = 2 * config["vocab_size"] * hidden
    return max(1, min(most, int((memory / 2 - 4 * ends) // (4 * layer))))


@dataclass
class Found:
    """What one mode gave, so far.

    Attributes:
        lengths, tried, kernels: events of the process, in order.
        longest: the last event of the search; empty if there was none.
        reason: why there is nothing, or no more.
    """

    mode: str
    lengths: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    longest: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None

    def hear(self, event: dict[str, Any]) -> None:
        """Keep an event."""
        kind = event.pop("event")
        if kind in ("length", "tried"):
            (self.lengths if kind == "length" else self.tried).append(event)
        elif kind == "kernels":
            self.kernels.append(event)
        elif kind in ("longest", "exact"):
            setattr(self, kind, event)

    def settle(self) -> None:
        """If the search was cut short, its last steps still say something."""
        fitting = [e["tokens"] for e in self.tried if e["fits"]]
        if not self.longest and fitting:
            self.longest = {"tokens": max(fitting), "too_many": None, "reason": "cut short"}


def in_process(job: Job, hear: Callable[[dict[str, Any]], None]) -> str | None:
    """Run a job in a process of its own, which is stopped after its time; why it failed, or None."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_steps"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        process.kill()

    timer = threading.Timer(job.seconds + GRACE, stop)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    timer.start()
    reader.start()
    process.stdin.write(as_json(job))
    process.stdin.close()
    for line in process.stdout:
        if line.startswith("event "):
            hear(json.loads(line.removeprefix("event ")))
    process.wait()
    timer.cancel()
    reader.join()
    if stopped.is_set():
        return "stopped: its share of the time was over"
    said = [line.strip() for line in errors if line.strip()]
    return f"failed: {said[-1][:200] if said else process.returncode}" if process.returncode else None


def in_place(job: Job, hear: Callable[[dict[str, Any]], None]) -> str | None:
    """Run a job here; why it failed, or None."""
    try:
        run(job, hear)
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error)[:200]}"
    return None


class Run:
    """All jobs, one after the other, and their results in files after each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.ends = args, time.monotonic() + 60 * args.minutes
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
        self.setup = Setup("cpu" if args.tiny else "cuda")
        config, layers = (TINY, TINY["num_hidden_layers"]) if args.tiny else CASES[args.case]
        self.config = {**config, "num_hidden_layers": args.layers or layers or self._layers(config)}
        self.found: list[Found] = []
        self.launch = in_place if args.tiny else in_process

    def _layers(self, config: dict[str, Any]) -> int:
        return layers_that_fit(config, torch.cuda.get_device_properties(0).total_memory)

    def job(self, mode: str) -> Job:
        """A mode's job, but for its share of the time."""
        made = Job(
            self.config,
            mode,
            LENGTHS,
            self.args.chunk,
            dtype=self.args.dtype,
            activation_bytes=parse_bytes(self.args.memory),
            longest=0 if "longest" in self.args.skip else 1 << 21,
            loss_chunk=self.args.loss_chunk,
            profile=self.args.profile,
        )
        if self.args.tiny:
            made = replace(made, tokens=(64, 128), chunk=32, device="cpu", longest=256, unit=64, steps=1)
        if self.args.lengths:
            made = replace(made, tokens=tuple(int(n) for n in self.args.lengths.split(",")))
        return made

    def go(self) -> int:
        """Run everything; returns the exit status: 1 if steps of ours were wanted and none gave figures."""
        tokens = 96 if self.args.tiny else 4096
        # without a mask and with one, for each attention kernel; and eager in float32 has to fit
        window = {"use_sliding_window": True, "sliding_window": tokens // 4, "max_window_layers": 1}
        words = min(EXACTNESS_WORDS, self.config["vocab_size"])
        config = {**self.config, "num_hidden_layers": 2, "vocab_size": words, **window}
        if "exactness" not in self.args.skip:
            exact = replace(self.job("streamed"), exact=tokens, config=config)
            left = self.ends - time.monotonic()
            self._do(Found("exactness"), exact, min(0.5, max(1.0 / 6, EXACTNESS / max(left, 1.0))))
        kind = self.config["model_type"]
        modes = self.args.modes.split(",") if self.args.modes else self._default()
        for position, name in enumerate(modes):
            found = Found(name, reason=MODES[name].unavailable(self.setup, kind))
            if found.reason:
                self.found.append(found)
            else:
                waiting = [m for m in modes[position:] if not MODES[m].unavailable(self.setup, kind)]
                self._do(found, self.job(name), 1 / len(waiting))
        self._write()
        ours = [f for f in self.found if f.mode in MODES and MODES[f.mode].ours]
        return 0 if not ours or any("median" in m for f in ours for m in f.lengths) else 1

    def _default(self) -> tuple[str, ...]:
        return ("checkpointing", "streamed", "streamed-host") if self.args.tiny else ORDER

    def _do(self, found: Found, job: Job, share: float) -> None:
        self.found.append(found)
        seconds = (self.ends - time.monotonic()) * share - (0 if self.args.tiny else GRACE)
        if seconds < (0 if self.args.tiny else 10):
            found.reason = "no time left"
            return
        self.console.print(f"{found.mode}: at most {seconds:.0f} s", style="dim")
        found.reason = self.launch(replace(job, seconds=seconds), found.hear)
        found.settle()
        self._write(quiet=True)

    def _write(self, quiet: bool = False) -> None:
        document = {
            "environment": environment(),
            "config": self.config,
            "chunk": self.args.chunk,
            "search_activation_bytes": parse_bytes(self.args.memory),
            "found": [vars(f) for f in self.found],
        }
        (self.args.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        with open(self.args.out / "table.txt", "w") as file:
            plain = Console(file=file, width=150)
            for table in gpu_tables(self.found, self.args.memory):
                plain.print(table)
                if not quiet:
                    self.console.print(table)


def main() -> int:
    """The command; returns the exit status."""
    args = parser().parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("error: there is no CUDA device; --tiny runs on a CPU", file=sys.stderr)
        return 2
    unknown = [m for m in (args.modes or "").split(",") if m and m not in MODES]
    if unknown:
        print(f"error: there is no mode {unknown[0]!r}; modes: {', '.join(MODES)}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    return Run(args).go()


if __name__ == "__main__":
    sys.exit(main())
