"""Engines that keep a piece of each parameter on each device, and what a streamed step asks of them.

fsdp2        `torch.distributed.fsdp.fully_shard`
zero3        DeepSpeed's ZeRO, stage 3
layers       which modules of a model are gathered together
others       engines that are not streamed, and what is said of them
"""

from torch import nn

from ..runtime.several_devices.parameter_groups import ShardedParameters
from . import fsdp2, others, zero3

ENGINES = (fsdp2.sharded, zero3.sharded, others.sharded)


def sharded_parameters(model: nn.Module) -> ShardedParameters | None:
    """The groups of parameters of a model that some engine has sharded; None if none has."""
    found = (engine(model) for engine in ENGINES)
    return next((s for s in found if s is not None), None)
