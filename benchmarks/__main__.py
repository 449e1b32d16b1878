"""The command line: `python -m benchmarks`, or `make bench ARGS=...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from streambp_fx.cli import at_least

from .cases import BATCH, CASES
from .errors import BenchmarkError
from .modes import Setup
from .session import Session
from .sweeps import AXES
from .tables import list_tables

OUT = Path("build/bench")
#: Of tables where there is no terminal, in characters.
WIDTH = 150


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be below zero, but is {value}")
    return value


def parser() -> argparse.ArgumentParser:
    """All arguments."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Peak memory and time of one training step, in each mode in a process of its own.",
    )
    what = made.add_argument_group("what is measured")
    what.add_argument(
        "--case", action="append", metavar="NAME", help=f"{', '.join([*CASES, BATCH])}; repeatable"
    )
    what.add_argument("--modes", metavar="A,B", help='modes instead of the case\'s own, or "all"')
    what.add_argument("--quick", action="store_true", help="four cases in a quarter of the length")
    what.add_argument("--sweep", action="append", choices=sorted(AXES), help="vary one size; repeatable")
    what.add_argument("--values", metavar="N,N", help="the sizes of a sweep")
    what.add_argument("--budget", default="2GiB", metavar="SIZE", help="memory of the case batch (2GiB)")
    what.add_argument(
        "--frontier", action="store_true", help="what memory buys: ours by memory=, and every peer's points"
    )
    what.add_argument("--peak-only", action="store_true", help="leave the time out")
    what.add_argument("--tiny", action="store_true", help="toy sizes, to try the machinery")
    what.add_argument("--list", action="store_true", help="show cases and modes, and run nothing")
    peers = made.add_argument_group("peers")
    peers.add_argument("--reference", type=Path, metavar="PATH", help="folder with streamed_qwen3.py")
    peers.add_argument("--published", type=Path, metavar="PATH", help="checkout of the published StreamBP")
    peers.add_argument(
        "--published-python", type=Path, metavar="PYTHON", help="its environment's (PATH/.venv/bin/python)"
    )
    how = made.add_argument_group("how")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    how.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="timed steps of a run (3)")
    how.add_argument("--rounds", type=at_least(1), default=1, metavar="N", help="timed runs of each mode (1)")
    how.add_argument("--threads", type=at_least(1), metavar="N", help="of PyTorch (as many as it chooses)")
    how.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"for results ({OUT})")
    how.add_argument("--docs", action="store_true", help="also write the figures of the documentation")
    against = made.add_argument_group("recorded ratios")
    against.add_argument("--check", action="store_true", help="quick; exit status 1 where a ratio got worse")
    against.add_argument("--record", action="store_true", help="quick; keep its ratios for later checks")
    against.add_argument("--recorded", type=Path, metavar="FILE", help="where they are")
    against.add_argument(
        "--tolerance", type=_share, default=0.10, metavar="X", help="worse by at most (0.10)"
    )
    return made


def _setup(args: argparse.Namespace) -> Setup:
    """The peers that were given.

    Raises:
        BenchmarkError: a path does not hold what it should, or there is no GPU.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: there is no CUDA device")
    if args.reference is not None and not (args.reference / "streamed_qwen3.py").is_file():
        raise BenchmarkError(f"--reference {args.reference}: there is no streamed_qwen3.py")
    python = args.published_python
    if args.published is not None:
        if not (args.published / "src" / "streambp").is_dir():
            raise BenchmarkError(f"--published {args.published}: there is no src/streambp")
        python = python or args.published / ".venv" / "bin" / "python"
        if not python.is_file():
            raise BenchmarkError(
                f"--published needs an environment with transformers 4.51: there is no {python}; name its "
                "Python with --published-python"
            )
    return Setup(args.device, args.reference, args.published, python)


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the benchmarks; returns the exit status: 0, 1 for a ratio that got worse, 2 for bad input."""
    args = parser().parse_args(argv)
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        setup = _setup(args)
        if args.list:
            for table in list_tables(setup):
                console.print(table)
            return 0
        return Session(args, setup, console).run()
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
