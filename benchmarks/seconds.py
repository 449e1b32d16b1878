"""Predicted seconds of a step beside measured ones: `python -m benchmarks.seconds`.

The rates of the machine are measured first, each step then runs in a process of its own, with an allocator
that keeps its memory. What is asked for: within a tenth, and of two ways to run a step that differ by more
than a twentieth the one that is said to be faster.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import streambp_fx
from streambp_fx.cost import eager_step
from streambp_fx.cost.step import StepCost
from streambp_fx.measure.step import StepSpec, run_isolated
from streambp_fx.models.by_name import model_on_meta
from streambp_fx.passes.cost.work import total
from streambp_fx.planning.measured_rates import rates_here

from .cases import CONFIGS
from .measuring import STEADY

#: Ways to run a step: a mode of `StepSpec`, and options of `transform`.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed": ("streamed", {}),
    'streamed, `save="attention"`': ("streamed", {"save": "attention"}),
    "checkpointing": ("checkpointing", {}),
    "eager": ("eager", {}),
}
STEPS = 3
# Two ways that differ by more than this share have to be in the right order.
APART = 0.05


def predicted(source: str, tokens: int, chunk: int, way: str) -> float:
    """Seconds of a step by the cost model and the rates of this machine."""
    mode, options = WAYS[way]
    cost = cost_of(source, tokens, chunk, **options)
    sizes = cost.sizes(tokens)
    if mode == "streamed":
        work = total(m.work for m in cost.timeline(sizes))
    else:
        work = eager_step.work(cost, sizes, checkpointing=mode == "checkpointing")
    return rates_here("float32").seconds(work)


@functools.cache
def cost_of(source: str, tokens: int, chunk: int, **options: Any) -> StepCost:
    """The cost of a step, which also knows what it would be unstreamed."""
    return streambp_fx.explain(model_on_meta(source, "float32"), tokens, chunk=chunk, **options).cost


def measured(source: str, tokens: int, chunk: int, way: str) -> float:
    """Seconds of a step in a process of its own, the median of some."""
    mode, options = WAYS[way]
    spec = StepSpec(source, mode, tokens, chunk, steps=STEPS, options=options)
    return run_isolated(spec, "time").seconds


def cases(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, float, float]]:
    """Of each model and way: its names, and predicted and measured seconds."""
    for name, config in CONFIGS.items():
        if args.only not in name:
            continue
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        for way in WAYS:
            given = str(path), args.tokens, args.chunk, way
            yield name, way, predicted(*given), measured(*given)


def misjudged(found: dict[str, tuple[float, float]]) -> list[str]:
    """Pairs of ways that are measured apart, and predicted the other way round."""
    wrong = []
    for (one, (said, took)), (other, (said_other, took_other)) in itertools.combinations(found.items(), 2):
        apart = abs(took - took_other) > APART * min(took, took_other)
        if apart and (said < said_other) != (took < took_other):
            wrong.append(f"{one} and {other}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the table, and returns 1 if two ways are in the wrong order."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seconds", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="models with this in their name")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of the sequence")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="rows of a chunk")
    args = parser.parse_args(argv)
    os.environ |= STEADY
    for line in rates_here("float32", again=True).lines:
        print(line)
    print("\n| model | step | predicted, s | measured, s | |\n|---|---|---|---|---|")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, way, said, took in cases(args, Path(folder)):
            found.setdefault(name, {})[way] = said, took
            print(f"| {name} | {way} | {said:.2f} | {took:.2f} | {said / took - 1:+.1%} |", flush=True)
    wrong = [f"{name}: {pair}" for name, own in found.items() for pair in misjudged(own)]
    print(f"\nin the wrong order: {'; '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
