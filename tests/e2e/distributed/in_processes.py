"""Several processes with a group of gloo, which run a function each and give back what it returns."""

from __future__ import annotations

import inspect
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Names of a collective in versions of PyTorch.
COLLECTIVES = {
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_single": "scatter",
    "all_reduce": "reduce",
    "send": "send",
}

# Which argument has all that is gathered or summed.
WHOLE = {
    "gather": ("output_tensor", "output"),
    "scatter": ("input", "input_tensor"),
    "reduce": ("tensor",),
    "send": ("tensor",),
}


def in_processes(
    folder: Path, world: int, function: Callable[..., Any], *arguments: Any, limit: float = 600
) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of `world` processes.

    Raises:
        TimeoutError: they did not end.
    """
    given = (world, str(folder), function, arguments)
    running = multiprocessing.spawn(_begin, args=given, nprocs=world, join=False)
    end = time.monotonic() + limit
    while not running.join(timeout=1):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"no end after {limit} seconds")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _begin(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine need not know its own name
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = function(rank, *arguments)
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that are called within, by kind."""
    found: Counter[str] = Counter()
    before = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[COLLECTIVES[name]] += 1
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextmanager
def called() -> Iterator[list[tuple[str, int]]]:
    """The collectives that are called within, in order: the kind, and bytes of what is gathered or summed."""
    found: list[tuple[str, int]] = []
    before = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(before[name]).bind(*args, **kwargs).arguments
            kind = COLLECTIVES[name]
            tensor = next(given[k] for k in WHOLE[kind] if k in given)
            found.append((kind, tensor.numel() * tensor.element_size()))
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, noting(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
