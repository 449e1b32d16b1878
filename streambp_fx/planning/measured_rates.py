"""How fast this machine is: measured once in a few seconds, and kept in a file.

What is measured is what a chunk does: products of some hundred rows with weights that are not in the cache,
attention of such rows with a longer prefix, elementwise ops on values of a chunk, and ops on hardly any data.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention, silu

from ..errors import PlanError
from .compute_rates import ComputeRates

# Seconds for each of what is measured.
BUDGET = 0.4
# A program takes as long, besides its ops, as so many ops on hardly any data (`compute_rates.PROGRAM`).
OPS_OF_PROGRAM = 80
# As many sets of operands as are used in turn: together they are larger than a cache.
SETS = 20


@dataclass(frozen=True)
class Shapes:
    """Of what is measured.

    Attributes:
        rows, prefix: of a chunk, and before it.
        hidden, wide: sizes of a layer's weight.
        vocabulary: rows of the head's weight, which half a chunk is multiplied with at once.
        heads, head_size: of attention.
    """

    rows: int
    prefix: int
    hidden: int
    wide: int
    vocabulary: int
    heads: int
    head_size: int


#: By the type of a device: those of models that are trained on it.
SHAPES = {"cpu": Shapes(512, 2048, 512, 1536, 32000, 8, 64)}
LARGE = Shapes(2048, 8192, 4096, 12288, 151936, 32, 128)


def rates_here(dtype: str, device: str | None = None, again: bool = False) -> ComputeRates:
    """The rates of this machine, from the file if they have been measured before.

    Args:
        dtype: of products, "float32" for instance.
        device: a type of device; None: an accelerator if there is one, else "cpu".
        again: measure even if the file has them.

    Raises:
        PlanError: PyTorch has no such dtype for products here.
    """
    kind = device or _device()
    key = " | ".join((_name(kind), dtype, torch.__version__))
    found = kept_or_measured(key, lambda: _measured(kind, dtype), again)
    return ComputeRates(**{**found, "lines": tuple(found["lines"])})


def kept_or_measured(key: str, measure: Callable[[], dict[str, Any]], again: bool = False) -> dict[str, Any]:
    """What the file of rates has under a key; if it has nothing, what is measured now, and is kept.

    Args:
        key: says what is measured, and of what.
        measure: returns what can be written as JSON.
        again: measure in any case.
    """
    known = _read()
    if again or key not in known:
        known[key] = measure()
        _write(known)
    return dict(known[key])


def file_of_rates() -> Path:
    """Where measured rates are kept: under `XDG_CACHE_HOME`, or under ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "streambp_fx" / "rates.json"


def _read() -> dict[str, Any]:
    try:
        return dict(json.loads(file_of_rates().read_text()))
    except (OSError, ValueError):
        return {}


def _write(known: dict[str, Any]) -> None:
    """Kept if it can be: a machine without a place for it is measured each time."""
    path = file_of_rates()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(known, indent=1))
        own.replace(path)
    except OSError:
        return


def _device() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def _name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} {device}, {torch.get_num_threads()} threads"


# ---- measuring


def _measured(device: str, dtype: str) -> dict[str, Any]:
    scale = SHAPES.get(device, LARGE)
    try:
        with _random_numbers_of_its_own(device), torch.no_grad():
            torch.manual_seed(0)
            kind = getattr(torch, dtype)
            call = _call_seconds(device)
            beside = device != "cpu"
            own = 0.0 if beside else call  # of what is measured
            memory = _memory_rate(device, scale, kind, own)
            products = _products_rate(device, scale, kind, memory, own)
            forwards, backwards = _attention_rates(device, scale, kind)
    except (RuntimeError, AttributeError) as error:
        raise PlanError(f"the rates of this machine cannot be measured in {dtype}: {error}") from error
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    words = (
        f"{_name(device)}, {dtype}, measured on {day}: products {_flops(products)}, "
        f"attention {_flops(forwards)} forwards and {_flops(backwards)} backwards",
        f"its memory, {memory / 1e9:,.3g} GB/s; {call * 1e6:.2g} us for an op",
    )
    return asdict(
        ComputeRates(products, forwards, backwards, memory, call, OPS_OF_PROGRAM * call, words, beside)
    )


def _random_numbers_of_its_own(device: str) -> AbstractContextManager[None]:
    if device == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=device)


def _flops(rate: float) -> str:
    return f"{rate / 1e9:,.4g} GFLOP/s"


def _median_seconds(device: str, calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, the median of rounds in which each is called once."""
    _round(device, calls)
    found, end = [_round(device, calls)], time.perf_counter() + BUDGET
    while time.perf_counter() < end:
        found.append(_round(device, calls))
    return statistics.median(found) / len(calls)


def _round(device: str, calls: Sequence[Callable[[], object]]) -> float:
    _wait(device)
    start = time.perf_counter()
    for call in calls:
        call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _call_seconds(device: str) -> float:
    """Of an op on hardly any data, called by a graph as programs are."""
    graph = fx.Graph()
    value = given = graph.placeholder("x")
    for _ in range(32):
        value = graph.call_function(torch.ops.aten.mul.Tensor, (value, given))
        value = graph.call_function(torch.ops.aten.mm.default, (value, given))
    graph.output(value)
    program, small = fx.GraphModule({}, graph), torch.zeros(8, 8, dtype=torch.float32, device=device)
    return _median_seconds(device, [lambda: program(small)]) / 64


def _memory_rate(device: str, scale: Shapes, dtype: torch.dtype, call: float) -> float:
    """Bytes a second of ops as they are between products."""
    sets = [[_drawn(device, dtype, scale.rows, scale.wide) for _ in range(2)] for _ in range(SETS)]
    size, calls = sets[0][0].nbytes, list[Callable[[], object]]()
    for first, second in sets:
        calls += [_of(torch.mul, first, second), _of(silu, first), _of(first.add_, second)]
        calls.append(functools.partial(torch.log_softmax, first, -1))
    return (3 + 2 + 3 + 2) / 4 * size / (_median_seconds(device, calls) - call)


def _products_rate(device: str, scale: Shapes, dtype: torch.dtype, memory: float, call: float) -> float:
    """Operations a second of products, without the time of the bytes that they read and write."""
    shapes = [(scale.rows, scale.wide)] * SETS + [(scale.rows // 2, scale.vocabulary)]
    calls, moved, operations = list[Callable[[], object]](), 0, 0
    for many, wide in shapes:
        rows, weight = (_drawn(device, dtype, n, scale.hidden) for n in (many, wide))
        gradient, total = _drawn(device, dtype, many, wide), torch.zeros_like(weight)
        calls += [_of(torch.mm, rows, weight.t()), _of(torch.mm, gradient, weight)]
        calls.append(_of(total.addmm_, gradient.t(), rows))
        moved += 3 * (rows.nbytes + weight.nbytes + gradient.nbytes) + total.nbytes
        operations += 3 * 2 * many * wide * scale.hidden
    seconds = len(calls) * (_median_seconds(device, calls) - call) - moved / memory
    return operations / max(seconds, 1e-9)


def _attention_rates(device: str, scale: Shapes, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second, forwards and backwards, counted as `passes.cost.work` counts them."""
    rows, columns = scale.rows, scale.prefix
    blocks = [(rows, columns, False), (rows, rows, True)]
    pairs = scale.heads * scale.head_size * (rows * columns + rows * (rows + 1) // 2)
    forwards, backwards = 0.0, 0.0
    for own, others, causal in blocks:
        query, key, value = (
            _drawn(device, dtype, 1, scale.heads, n, scale.head_size).requires_grad_()
            for n in (own, others, others)
        )
        attention = functools.partial(scaled_dot_product_attention, query, key, value, is_causal=causal)
        forwards += _median_seconds(device, [attention])
        with torch.enable_grad():
            out = attention()
        gradient, leaves = torch.randn_like(out), (query, key, value)
        again = functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)
        backwards += _median_seconds(device, [again])
    return 4 * pairs / forwards, 10 * pairs / backwards


def _drawn(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _of(function: Callable[..., object], *given: Tensor) -> Callable[[], object]:
    return lambda: function(*given)
