"""What DeepSpeed's ZeRO calls in a step: what one process runs."""

from __future__ import annotations

import os
from typing import Any

import torch
from distributed_cases import BATCHES, MODELS
from distributed_planned import Called

import streambp_fx

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
STAGES = {
    1: {"stage": 1},
    2: {"stage": 2},
    3: {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
    },
}
KINDS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "reduce"}


def run_zero(rank: int, stage: int) -> Called:
    """Kind and bytes of the collectives of the second step, without those of a few numbers."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm.torch import TorchBackend

    found: Called = []

    def noting(name: str) -> Any:
        function = getattr(TorchBackend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            size = max(t.numel() * t.element_size() for t in tensors)
            if size > 64:  # how many have overflown, say
                found.append((KINDS[name], size))
            return function(*args, **kwargs)

        return call

    for name in KINDS:
        setattr(TorchBackend, name, noting(name))
    torch.manual_seed(0)
    made = MODELS["dense"]().float().train()
    engine, *_ = deepspeed.initialize(
        model=made,
        config={**CONFIG, "zero_optimization": {**STAGES[stage], "reduce_bucket_size": 100_000}},
        optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
    )
    streambp_fx.transform(made, chunk=8, check="never")
    for number in range(2):
        found.clear()
        engine.backward(engine(**BATCHES["even"](rank, number)).loss)
        engine.step()
    return found
