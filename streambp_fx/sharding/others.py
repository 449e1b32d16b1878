"""Engines whose models are not streamed: what a step says of them, in place of how its capture fails."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..runtime.several_devices.parameter_groups import NotSupported

DTENSORS = (
    "parameters are DTensors that no engine gathers for the step, as of tensor parallelism. Of the engines "
    "that store pieces of parameters, fully_shard (FSDP2) and DeepSpeed's ZeRO-3 are streamed"
)
FSDP1 = (
    "parts of the model are wrapped in FullyShardedDataParallel (FSDP1), whose hooks cannot be captured. "
    "Use torch.distributed.fsdp.fully_shard (FSDP2), or wrap the model as a whole"
)


def are_dtensors(values: Iterable[Any]) -> bool:
    """True if one of these values is a `DTensor`, of any shape and dtype."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(v, module.DTensor) for v in values)


def sharded(model: nn.Module) -> None:
    """Refuse a model that cannot be captured as an engine has wrapped it.

    Raises:
        NotSupported: it cannot.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is not None and any(isinstance(m, wrapper) for m in model.modules()):
        raise NotSupported(FSDP1)
