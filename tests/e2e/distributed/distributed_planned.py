"""What a plan says of collectives, and what two processes call: each function is what one process runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import BATCHES, ENGINES, MODELS
from in_processes import called
from torch import nn
from torch.fx import Node

import streambp_fx
from streambp_fx.cost.step import StepCost
from streambp_fx.explain import captured
from streambp_fx.passes.s6_schedule.collectives import CollectiveKind, collectives_of
from streambp_fx.passes.s6_schedule.program import StepProgram
from streambp_fx.planning.engines import Engine

# Names of `ENGINES` as a plan has them, for two devices.
PLANNED = {
    "fsdp2": Engine("fsdp2", 2),
    "root": Engine("fsdp2", 2, wrap="model"),
    "kept": Engine("fsdp2", 2, reshard=False),
    "ddp": Engine("ddp", 2, limits=(20_971, 20_971)),
    "zero1": Engine("zero1", 2),
    "zero2": Engine("zero2", 2),
    "zero3": Engine("zero3", 2),
}
KINDS = {
    "gather": CollectiveKind.ALL_GATHER,
    "scatter": CollectiveKind.REDUCE_SCATTER,
    "reduce": CollectiveKind.ALL_REDUCE,
}
Called = list[tuple[str, int]]


@functools.cache
def _explained(model: str, dtype: torch.dtype) -> tuple[nn.Module, streambp_fx.Schedule, dict[int, Node]]:
    with torch.device("meta"):
        made = MODELS[model]().to(dtype)
    return made, *captured(made, 33, 2, {"chunk": 8})


def planned(model: str, engine: str, dtype: torch.dtype = torch.float64) -> Called:
    """Kind and bytes of each collective of a step, of a model without weights; nothing is run."""
    made, schedule, nodes = _explained(model, dtype)
    facts = dataclasses.replace(schedule.facts)
    PLANNED[engine].share(facts, made, nodes)
    after = PLANNED[engine].after_step(made)
    return _of(StepCost(facts, schedule.options).step_program) + [("gather", after)] * (after > 0)


def _of(program: StepProgram) -> Called:
    names = {kind: name for name, kind in KINDS.items()}
    found = (c for i in program.instructions() for c in collectives_of(program, i))
    return [(names[c.kind], c.bytes) for c in found]


def run(rank: int, cases: list[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Of each case the collectives of the second step, and those that the schedule of the model says.

    Args:
        cases: the model, the engine, and whether it is streamed.
    """
    found = []
    for model, engine, streamed in cases:
        torch._dynamo.reset()
        torch.manual_seed(0)
        made = MODELS[model]().to(torch.float64).train()
        wrapped = ENGINES[engine](made)
        if streamed:
            streambp_fx.transform(made, chunk=8, check="never")
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, lambda state, bucket: _summed(bucket))
        for number in range(2):  # DDP makes its buckets anew after the first step
            with called() as own:
                wrapped(**BATCHES["even"](rank, number)).loss.backward()
            wrapped.zero_grad()
        schedule = streambp_fx.schedule(made) if streamed else None
        said = None if schedule is None else _of(schedule.program.instructions)
        found.append({"called": own, "said": said})
    return found


def _summed(bucket: Any) -> Any:
    """What DDP does with a bucket, called from Python, where it is counted."""
    mean = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])
