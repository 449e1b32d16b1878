"""How much memory a step may take: of what is free on its device, a share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

# Of what is free: allocators keep some of it in pieces, and others want some, too.
SHARE = 0.8


def activation_budget(tensors: Sequence[Tensor], pieces: Mapping[int, int] | None = None) -> int | None:
    """Bytes that activations may take: a share of what is free, less the gradients that are still to come.

    Args:
        tensors: inputs of the graph, parameters among them, of any shape and dtype; all are on one device.
        pieces: by `id` of a parameter, in how many pieces it and its gradient are stored, if not in one.

    Returns:
        None where it cannot be told what is free.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    free = free_bytes(device)
    if free is None:
        return None
    return max(0, int(SHARE * free) - gradients_to_come(tensors, pieces or {}))


def gradients_to_come(tensors: Sequence[Tensor], pieces: Mapping[int, int]) -> int:
    """Bytes of the gradients that trained parameters, of any shape and dtype, do not have yet.

    Args:
        tensors, pieces: as of `activation_budget`.
    """
    leaves = (t for t in tensors if t.is_leaf and t.requires_grad and t.grad is None)
    return sum(t.nbytes // pieces.get(id(t), 1) for t in leaves)


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
