"""Engines of several devices on paper: groups and buckets of a model as the engine would make them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..errors import PlanError
from ..passes.graph.facts import Facts, tensors_of
from ..passes.several_devices import Buckets, SeveralDevices, SharedGroup
from ..sharding.layers import layers_of, owners
from ..sharding.zero3 import BUCKET
from .arrival import arrival

#: What `plan` knows.
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
WRAPS = ("layers", "model")
# Of DistributedDataParallel: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, and `bucket_cap_mb`, in bytes.
DDP_LIMITS = (2**20, 25 * 2**20)


@dataclass(frozen=True)
class Engine:
    """An engine with its settings.

    Attributes:
        name: one of `ENGINES`.
        devices: how many.
        wrap: what FSDP2's `fully_shard` is called on before it is on the model: "layers", or "model" for
            nothing else.
        reshard: FSDP2's `reshard_after_forward` of the layers.
        limits: bytes of DDP's first bucket and of the later ones.
        context_parallel: devices over which the rows of each sequence are distributed.

    Raises:
        PlanError: there is no such engine, or a setting is not allowed.
    """

    name: str
    devices: int
    wrap: str = "layers"
    reshard: bool = True
    limits: tuple[int, int] = DDP_LIMITS
    context_parallel: int = 1

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise PlanError(f"shard must be one of {', '.join(ENGINES)}, not {self.name!r}")
        if isinstance(self.devices, bool) or not isinstance(self.devices, int) or self.devices < 1:
            raise PlanError(f"gpus must be an int of at least 1, not {self.devices!r}")
        along = self.context_parallel
        if isinstance(along, bool) or not isinstance(along, int) or along < 1 or self.devices % along:
            raise PlanError(f"context_parallel must divide gpus ({self.devices}), not be {along!r}")
        if along > 1 and self.name not in ("ddp", "fsdp2"):
            raise PlanError(f"context_parallel goes with ddp and fsdp2, and was not tried with {self.name}")
        if self.wrap not in WRAPS:
            raise PlanError(f"wrap must be one of {', '.join(WRAPS)}, not {self.wrap!r}")
        if self.name != "fsdp2" and (self.wrap != "layers" or not self.reshard):
            raise PlanError(f"wrap and reshard_after_forward are settings of fsdp2, not of {self.name}")

    # ---- what is shared

    def share(self, facts: Facts, model: nn.Module, nodes: Mapping[int, Node]) -> None:
        """Note in the facts of a graph how the engine would share the parameters of the model.

        It is what a run with this engine notes (`GraphGroups`), so that the step program is the same.

        Args:
            facts: of the graph.
            model: whose graph it is.
            nodes: by `id` of a parameter what it is in the graph.
        """
        if self.name in ("ddp", "zero1", "zero2"):
            facts.several = SeveralDevices(buckets=self._buckets(facts))
            return
        in_buckets = self._buckets(facts) if self.name == "zero3" else None
        own: dict[str, list[Node]] = {}
        sizes: dict[str, int] = {}
        for parameter, group in self._grouped(model):
            sizes[group] = sizes.get(group, 0) + self._bytes(parameter)
            if id(parameter) in nodes:
                own.setdefault(group, []).append(nodes[id(parameter)])
        around = [name for name in own if self.name == "fsdp2" and not name]
        taken = [name for name in own if name not in around]
        facts.parameter_groups = tuple(tuple(own[name]) for name in taken)
        shared = (self._shared(name, own[name], sizes[name], name in around) for name in (*taken, *around))
        named = (replace(group, name=group.name or type(model).__name__) for group in shared)
        of_caller = tuple(tuple(own[name]) for name in around)
        facts.several = SeveralDevices(tuple(named), of_caller, in_buckets)

    def _grouped(self, model: nn.Module) -> Iterator[tuple[Tensor, str]]:
        """Each parameter once, with the name of the module with whose parameters it is gathered."""
        modules: Iterable[tuple[str, nn.Module]] = owners(model)
        if self.name == "fsdp2":
            modules = [*(layers_of(model) if self.wrap == "layers" else ()), ("", model)]
        seen: set[int] = set()
        for name, module in modules:
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter, name

    def _shared(self, name: str, nodes: list[Node], gathered: int, around: bool) -> SharedGroup:
        return SharedGroup(
            name=name,
            devices=self.devices,
            stays=around or not self.reshard,
            ahead=True,
            gathered_bytes=gathered,
            reduced_bytes={n: self._bytes(tensors_of(n)[0]) for n in nodes if self.name == "fsdp2"},
        )

    def _bytes(self, parameter: Tensor) -> int:
        """Bytes of all pieces of a parameter: FSDP2 cuts its first dim into equal ones, ZeRO all numbers."""
        count = parameter.numel()
        unit = count // parameter.shape[0] if self.name == "fsdp2" and parameter.dim() and count else 1
        padded = math.ceil(count / unit / self.devices) * self.devices * unit
        return padded * parameter.element_size()

    def _buckets(self, facts: Facts) -> Buckets:
        if self.name == "ddp":
            return Buckets(self.devices, self.limits, arrival=arrival)
        largest = max((tensors_of(n)[0].element_size() for n in facts.parameters), default=1)
        limit, third = BUCKET * largest, self.name == "zero3"  # which has `overlap_comm` by default
        return Buckets(self.devices, (limit, limit), closes_before=True, scattered=third, ahead=third)

    # ---- what each device holds all the time, in bytes

    def weights(self, model: nn.Module) -> int:
        """Bytes of the weights on each device between steps; buffers are there in full."""
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        return buffers + sum(self._held(p, self.name in ("zero3", "fsdp2")) for p in model.parameters())

    def gradients(self, model: nn.Module) -> int:
        """Bytes of the gradients on each device when the backward has run.

        DDP holds its buckets beside them (`gradient_as_bucket_view=False`, the default), DeepSpeed one
        bucket, which it makes in its full size.
        """
        trained = _trained(model)
        own = sum(self._held(p, self.name in ("zero2", "zero3", "fsdp2")) for p in trained)
        if self.name == "ddp":
            return 2 * own
        bucket = BUCKET * max((p.element_size() for p in trained), default=0)
        return own + (bucket if self.name != "fsdp2" else 0)

    def optimizer(self, model: nn.Module, states: int) -> int:
        """Bytes of the optimizer's states on each device.

        DeepSpeed keeps the trained weights in float32 beside half-precision ones, and the states in float32.

        Args:
            states: how many an optimizer has for each weight; 0 also if there are none on the device.
        """
        if self.name == "ddp":
            return states * sum(self._held(p, False) for p in _trained(model))
        total = 0
        for parameter in _trained(model):
            pieces, size = self._bytes(parameter) // self.devices, parameter.element_size()
            wide = self.name != "fsdp2" and size < 4 and states > 0
            total += pieces // size * 4 * (states + 1) if wide else states * pieces
        return total

    def after_step(self, model: nn.Module) -> int:
        """Bytes of weights that are gathered when the optimizer has changed each device's part of them."""
        if self.name not in ("zero1", "zero2"):
            return 0
        return sum(self._bytes(p) for p in _trained(model))

    def _held(self, parameter: Tensor, in_pieces: bool) -> int:
        if in_pieces:
            return self._bytes(parameter) // self.devices
        return parameter.numel() * parameter.element_size()


def _trained(model: nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def engine_for(
    gpus: int | None,
    shard: str | None,
    wrap: str = "layers",
    reshard: bool = True,
    context_parallel: int = 1,
) -> Engine | None:
    """The engine that a user asks for; None if there is one device.

    Args:
        gpus: how many devices.
        shard: a name in `ENGINES`.
        wrap, reshard, context_parallel: see `Engine`.

    Raises:
        PlanError: something is missing, or is not allowed.
    """
    if gpus is None and shard is None:
        if (wrap, reshard, context_parallel) != ("layers", True, 1):
            names = "wrap, reshard_after_forward and context_parallel"
            raise PlanError(f"{names} are for several devices: give gpus and shard")
        return None
    if gpus is None or shard is None:
        missing = "gpus, how many there are" if gpus is None else f"shard, one of {', '.join(ENGINES)}"
        raise PlanError(f"several devices need both gpus and shard: give {missing}")
    return Engine(shard, gpus, wrap, reshard, context_parallel=context_parallel)
