"""`chunk="auto"`: the rows of a chunk, chosen by the cost model for the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor

from .options import AUTO_CHUNK, CHUNK_SIZES, Options

log = logging.getLogger(__name__)
# Of what is free: allocators keep some of it in pieces, and others want some, too.
SHARE = 0.8
# One choice serves lengths up to the next multiple of this: ragged batches do not choose again and again.
STEP = 1024


def choose_rows(peak: Callable[[int], int], budget: int | None, tokens: int) -> int:
    """The largest of `CHUNK_SIZES` with which a step fits.

    Larger chunks are no faster, and smaller ones than the smallest are slower; so it is the smallest if none
    fits.

    Args:
        peak: peak activation bytes for a number of rows.
        budget: bytes that activations may take; None: there is no limit.
        tokens: sequence length.
    """
    if budget is None or tokens <= CHUNK_SIZES[-1]:
        return AUTO_CHUNK
    return next((rows for rows in CHUNK_SIZES if peak(rows) <= budget), CHUNK_SIZES[-1])


class Chooser:
    """Chooses for one compiled graph, once for each length (to the next `STEP`) and batch size.

    Args:
        cost: makes the cost model of the graph, when it is first needed.
        options: `memory` is the budget; without one, a share of what is free on the device.
        chosen: called with each choice.
    """

    def __init__(self, cost: Callable[[], Any], options: Options, chosen: Callable[[int], None]) -> None:
        self.make_cost, self.options, self.chosen = cost, options, chosen
        self.cost: Any = None
        self.rows: dict[tuple[int, ...], int] = {}

    def __call__(self, tokens: int, others: Mapping[sympy.Symbol, int], inputs: Sequence[Any]) -> int:
        """Rows of a chunk for a sequence length; `inputs` are those of the graph, parameters among them."""
        up_to = -(-tokens // STEP) * STEP
        key = (up_to, *others.values())
        if key not in self.rows:
            self.rows[key] = self._choose(up_to if tokens > STEP else tokens, others, inputs)
            log.info("chunk of %d rows for sequences of up to %d tokens", self.rows[key], up_to)
            self.chosen(self.rows[key])
        return self.rows[key]

    def _choose(self, tokens: int, others: Mapping[sympy.Symbol, int], inputs: Sequence[Any]) -> int:
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        budget = self.options.memory_bytes
        if budget is None:
            budget = activation_budget(tensors)
        return choose_rows(lambda rows: self._peak(tokens, rows, others), budget, tokens)

    def _peak(self, tokens: int, rows: int, others: Mapping[sympy.Symbol, int]) -> int:
        if self.cost is None:
            self.cost = self.make_cost()
        return self.cost.peak(self.cost.sizes(tokens, rows, others)).total


def activation_budget(tensors: Sequence[Tensor]) -> int | None:
    """Bytes that activations may take: a share of what is free, less the gradients that are still to come."""
    device = tensors[0].device if tensors else torch.device("cpu")
    free = free_bytes(device)
    if free is None:
        return None
    coming = sum(t.nbytes for t in tensors if t.is_leaf and t.requires_grad and t.grad is None)
    return max(0, int(SHARE * free) - coming)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where it cannot be told (neither CUDA nor Linux)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [v for v in (_available(), _left_to_group()) if v is not None]
    return min(known, default=None)


def _available(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _left_to_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves, if there is one."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
