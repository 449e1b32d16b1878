"""One size varied, the others fixed: how peak and time grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from .cases import CASES, Workload, floor_bytes_per_token
from .errors import BenchmarkError
from .fits import exponent, slope
from .measuring import Meter, Result
from .modes import Mode
from .tables import MIB, new_table, number

#: Chunk of a sweep over tokens, whatever the length, so that a chunk's own memory is constant.
FIXED_CHUNK = 512
#: Growth of the peak that is required: at most this many times the floor.
GROWTH = 1.25
MODES = "checkpointing,checkpointing-fused-loss,streamed,streamed-attention"


@dataclass(frozen=True)
class Axis:
    """A size that is varied.

    Attributes:
        of: the size of a workload.
        sizes, quick: its values by default, and in a quick run.
    """

    of: Callable[[Workload], int]
    sizes: tuple[int, ...]
    quick: tuple[int, ...]


AXES = {
    "tokens": Axis(lambda w: w.tokens, (2048, 4096, 8192, 16384), (1024, 2048, 4096)),
    "chunk": Axis(lambda w: w.chunk, (256, 512, 1024, 2048, 4096), (128, 256, 512)),
    "layers": Axis(lambda w: w.layers or 4, (2, 4, 8), (1, 2, 4)),
    "batch": Axis(lambda w: w.batch, (1, 2, 4), (1, 2, 4)),
}


def workloads(axis: str, values: Sequence[int] | None, base: Workload, quick: bool) -> list[Workload]:
    """The workloads of a sweep.

    Raises:
        BenchmarkError: fewer than two sizes, or one that is not above zero.
    """
    sizes = values or (AXES[axis].quick if quick else AXES[axis].sizes)
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise BenchmarkError("a sweep needs two sizes or more, all above zero")
    if axis == "tokens":
        base = replace(base, chunk=min(base.chunk, FIXED_CHUNK))
    elif axis == "batch":
        base = replace(base, tokens=min(base.tokens, 2048), chunk=min(base.chunk, FIXED_CHUNK))
    return [replace(base, **{axis: size}) for size in sorted(set(sizes))]  # type: ignore[arg-type]


def base_of(quick: bool) -> Workload:
    """The workload that is varied: the first case's, in a quick run in a quarter of its length."""
    found = CASES["dense"].workload
    return found.scaled(4) if quick else found


def fitted(axis: str, own: Sequence[Result]) -> dict[str, Any]:
    """Exponents of peak and time of one mode's results; over tokens, also bytes per token and their floor."""
    size = AXES[axis].of
    peaks = [(size(r.workload), r.peak_bytes) for r in own if r.peak_bytes]
    times = [(size(r.workload), r.median) for r in own if r.median]
    found: dict[str, Any] = {
        "peak_exponent": exponent(*zip(*peaks, strict=True)) if len(peaks) > 1 else None,
        "time_exponent": exponent(*zip(*times, strict=True)) if len(times) > 1 else None,
    }
    config = own[0].workload.config
    if axis == "tokens" and len(peaks) > 1 and config is not None:
        floor = floor_bytes_per_token(config, own[0].workload.dtype) * own[0].workload.batch
        grown = slope(*zip(*peaks, strict=True))
        found |= {"bytes_per_token": grown, "floor_bytes_per_token": floor, "times_floor": grown / floor}
    return found


def by_mode(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each mode, in order."""
    found: dict[str, list[Result]] = {}
    for r in results:
        found.setdefault(r.mode.name, []).append(r)
    return found


def run_sweep(meter: Meter, steps: Sequence[Workload], modes: Sequence[Mode], time: bool) -> list[Result]:
    """Measure every mode on every workload."""
    meter.measure([(w, m) for w in steps for m in modes], time)
    # A mode without chunks is measured once for all chunks; each size gets its result.
    return [replace(meter.result(w, m), workload=w) for m in modes for w in steps]


def sweep_tables(axis: str, results: Sequence[Result]) -> list[Table]:
    """What was measured, and the fits."""
    base = results[0].workload
    measured = new_table(f"Sweep over {axis}: {base.title} at first", "mode", axis, "peak MiB", "step s", "")
    fits = new_table("Growth", "mode", "peak ~ size^", "time ~ size^", "bytes a token", "floor", "of it")
    for name, own in by_mode(results).items():
        for r in own:
            peak = number(r.peak_bytes and r.peak_bytes / MIB, ".1f")
            measured.add_row(name, str(AXES[axis].of(r.workload)), peak, number(r.median), r.reason or "")
        fit = fitted(axis, own)
        fits.add_row(
            name,
            number(fit["peak_exponent"]),
            number(fit["time_exponent"]),
            number(fit.get("bytes_per_token"), ",.0f"),
            number(fit.get("floor_bytes_per_token"), ",.0f"),
            number(fit.get("times_floor"), ".2f", "x"),
        )
    if axis == "tokens":
        fits.caption = f"required of streamed: at most {GROWTH}x the floor, chunk {base.chunk}"
        fits.caption_justify = "left"
    return [measured, fits]
