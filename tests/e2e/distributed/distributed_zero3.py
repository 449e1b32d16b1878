"""DeepSpeed's ZeRO, stage 3: what one process runs."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from distributed_cases import BATCHES, MODELS, STEPS

import streambp_fx

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "reduce_bucket_size": 100_000,
    },
}


def train_zero3(rank: int, model: str, batch: str, order: str | None) -> dict[str, Any]:
    """Losses, gathers of a step, most numbers of parameters that were there, and parameters at the end.

    Args:
        order: whether the model is transformed "before" or "after" DeepSpeed wraps it; None: it is not.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.manual_seed(0)
    made = MODELS[model]().float().train()
    if order == "before":
        streambp_fx.transform(made, chunk=8)
    trained = [p for p in made.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=made, config=CONFIG, optimizer=torch.optim.SGD(trained, lr=0.1))
    if order == "after":
        streambp_fx.transform(made, chunk=8)
    calls: Counter[str] = Counter()
    most = 0
    gather = deepspeed.comm.allgather_fn

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        calls["gathers"] += 1
        most = max(most, sum(p.ds_numel for p in made.parameters() if p.ds_status.name == "AVAILABLE"))
        return gather(*args, **kwargs)

    deepspeed.comm.allgather_fn = counting
    losses = []
    for number in range(STEPS):
        calls.clear()
        loss = engine(**BATCHES[batch](rank, number)).loss
        engine.backward(loss)
        left = sum(p.ds_status.name == "AVAILABLE" for p in made.parameters())
        engine.step()
        losses.append(float(loss.detach()))
    parameters = {}
    for name, parameter in made.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            parameters[name] = parameter.detach().clone()
    schedule = streambp_fx.schedule(made)
    return {
        "losses": losses,
        "gathers": calls["gathers"],
        "most": most,
        "left": left,
        "all": sum(p.ds_numel for p in made.parameters()),
        "parameters": parameters,
        "chunked": None if schedule is None else [s.chunked for s in schedule.segments],
    }
