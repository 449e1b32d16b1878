"""The largest batch that a fixed amount of memory holds, with checkpointing and streamed.

The cost model makes the first guess. What counts is measured: the largest batch whose step was seen to fit,
and the smallest that was seen not to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from .cases import CASES, Workload
from .errors import BenchmarkError
from .measuring import Meter
from .modes import LOSS_CHUNK, MODES, PEER
from .tables import MIB, new_table, number

TOKENS = 2048
CHUNKS = (2048, 1024, 512, 256, 128)
#: Times as many sequences as checkpointing holds that are required of the streamed step.
REQUIRED = 5.0
#: Steps that are measured at most to confirm a guess.
TRIES = 6
BATCH_MODES = (PEER, "checkpointing-chunked-loss", "streamed")


@dataclass(frozen=True)
class Search:
    """The largest batch of one mode.

    Attributes:
        predicted: by the cost model; None: it does not know the mode.
        fits: the largest batch that was measured to fit; 0: none did.
        too_many: the smallest that was measured not to; None: none was found.
        measured: peak bytes by batch.
        reason: why there are no figures.
    """

    mode: str
    chunk: int
    predicted: int | None
    fits: int
    too_many: int | None
    measured: dict[int, int]
    reason: str | None = None


def largest(fits: Callable[[int], bool], most: int = 1 << 16) -> int:
    """The largest number in [0, most] that fits, by bisection; beyond one that does not, none does."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def confirmed(
    guess: int, budget: int, peak_of: Callable[[int], int], tries: int = TRIES
) -> tuple[int, int | None, dict[int, int]]:
    """The largest batch measured to fit, the smallest measured not to, and the peaks that were measured.

    Peaks grow about in proportion to the batch: each try is where the one before says that the budget is met.
    """
    low, high, peaks = 0, None, {}  # type: ignore[var-annotated]
    batch = max(1, guess)
    for _ in range(tries):
        peaks[batch] = peak = peak_of(batch)
        if peak <= budget:
            low = max(low, batch)
        else:
            high = batch if high is None else min(high, batch)
        if high is not None and high - low <= 1:
            break
        aimed = max(low + 1, int(batch * budget / max(1, peak)))
        batch = aimed if high is None else min(aimed, high - 1)
    return low, high, peaks


class Predicted:
    """Peaks by the cost model, for every batch size, from one capture of a model without weights."""

    def __init__(self, workload: Workload) -> None:
        import torch

        from streambp_fx.plan import Planner

        from .gpu_steps import make_model

        config = dict(workload.config or {})
        if not config:
            raise BenchmarkError(f"the batch of {workload.source} cannot be predicted: it has no config here")
        model = make_model(config, "meta", getattr(torch, workload.dtype))
        # Captured with a batch of two, the batch size is a symbol.
        self.planner = Planner(model, batch_size=2, loss_chunk=LOSS_CHUNK)
        self.tokens = workload.tokens

    def largest(self, budget: int, chunk: int | None) -> int:
        """The largest batch that fits; with checkpointing if there is no chunk."""
        import sympy

        from streambp_fx.cost import eager_step
        from streambp_fx.cost.held_bytes import BATCH, CHUNK, LOSS_CHUNK, TOKENS
        from streambp_fx.options import Options

        cost, loss_rows = self.planner.cost, Options().loss_rows
        general = eager_step.peak_expression(cost, True) if chunk is None else cost.peak_expression()
        peak = sympy.lambdify((BATCH, TOKENS, CHUNK, LOSS_CHUNK), cost.for_batch(general), "math")
        rows = chunk or self.tokens
        return largest(lambda batch: peak(batch, self.tokens, rows, loss_rows(batch)) <= budget)


def run_batch(meter: Meter, budget: int, base: Workload | None = None) -> list[Search]:
    """Search the largest batch of each mode for `budget` bytes over weights and gradients."""
    step = base or replace(CASES["dense"].workload, tokens=TOKENS)
    predicted = Predicted(step)
    found = []
    for name in BATCH_MODES:
        mode, chunk, guess = MODES[name], step.tokens, None
        if mode.chunked:
            sizes = {c: predicted.largest(budget, c) for c in CHUNKS if c <= step.tokens} or {step.tokens: 1}
            chunk = max(sizes, key=lambda c: (sizes[c], c))
            guess = sizes[chunk]
        elif name == PEER:
            guess = predicted.largest(budget, None)
        found.append(_search(meter, replace(step, chunk=chunk), name, guess, budget))
    return found


def _search(meter: Meter, step: Workload, name: str, guess: int | None, budget: int) -> Search:
    """Measure around the guess."""

    def peak_of(batch: int) -> int:
        item = (replace(step, batch=batch), MODES[name])
        meter.measure([item], time=False)
        result = meter.result(*item)
        if result.peak_bytes is None:
            raise _NotMeasured(result.reason)
        return result.peak_bytes

    try:
        low, high, peaks = confirmed(1 if guess is None else guess, budget, peak_of)
    except _NotMeasured as error:
        return Search(name, step.chunk, guess, 0, None, {}, str(error))
    return Search(name, step.chunk, guess, low, high, peaks)


class _NotMeasured(Exception):
    """A step failed; the reason is the message."""


def batch_table(searches: list[Search], budget: int, tokens: int) -> Table:
    """The batches of all modes, and how many times checkpointing's they are."""
    title = f"batch: the largest of {tokens:,} tokens in {budget / MIB:,.0f} MiB over weights and gradients"
    table = new_table(title, "mode", "chunk", "predicted", "fits", "does not", "times", "")
    peer = next((s.fits for s in searches if s.mode == PEER), 0)
    for s in searches:
        times = s.fits / peer if peer else None
        chunk = str(s.chunk) if MODES[s.mode].chunked else "-"
        cells = (number(s.predicted, "d"), str(s.fits), number(s.too_many, "d"), number(times, ".1f", "x"))
        table.add_row(s.mode, chunk, *cells, s.reason or "")
    table.caption = f"required of streamed: at least {REQUIRED:.0f}x; fits and does not: measured"
    table.caption_justify = "left"
    return table


def as_dicts(searches: list[Search]) -> list[dict[str, Any]]:
    """Ready for JSON."""
    return [asdict(s) for s in searches]
