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

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from streambp_fx.runtime.segments.segment_runner import SegmentRunner

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


@contextmanager
def events() -> Iterator[list[str]]:
    """What happens in a step: gathers that are begun and waited for, sums, and computing of chunks."""
    kind: Any = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
    found: list[str] = []

    def noting(what: str, real: Callable[..., Any], counts: Callable[[Any], bool]) -> Callable[..., Any]:
        def call(group: Any, *given: Any, **named: Any) -> Any:
            if counts(group):
                found.append(f"{what} {group._module_fqn.rpartition('.')[2] or 'model'}")
            return real(group, *given, **named)

        return call

    def computing(runner: SegmentRunner, *given: Any) -> Any:
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        event = f"{phase} of segment {runner.segment.index}"
        found.extend([event] if found[-1] != event else [])
        return real_call(runner, *given)

    real_call = SegmentRunner.call
    with pytest.MonkeyPatch.context() as patch:
        begins = noting("begin", kind.unshard, lambda g: g.is_sharded and g._all_gather_result is None)
        waits = noting("wait", kind.wait_for_unshard, lambda g: g._all_gather_result is not None)
        patch.setattr(kind, "unshard", begins)
        patch.setattr(kind, "wait_for_unshard", waits)
        patch.setattr(kind, "post_backward", noting("sum", kind.post_backward, lambda g: True))
        patch.setattr(SegmentRunner, "call", computing)
        yield found
