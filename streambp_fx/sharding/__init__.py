"""Engines that keep a piece of each parameter on each device, and what a streamed step asks of them.

fsdp2        `torch.distributed.fsdp.fully_shard`
"""

from torch import nn

from ..runtime.sharded_parameters import ShardedParameters
from . import fsdp2


def sharded_parameters(model: nn.Module) -> ShardedParameters | None:
    """The groups of parameters of a model that some engine has sharded; None if none has."""
    groups = fsdp2.groups_of(model)
    return ShardedParameters(groups) if groups else None
