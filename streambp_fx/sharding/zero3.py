"""DeepSpeed's ZeRO, stage 3: a group for each layer, gathered at once and partitioned again.

DeepSpeed gathers the parameters of each module by themselves, in hooks around the module, with parameters of
modules that come later in the order of the step before. Here those of a layer are gathered together, by the
same functions, while the layer before it computes. Gradients are reduced by hooks of DeepSpeed's on each
parameter, which stay as they are.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..passes.several_devices import Buckets
from ..runtime.segments.owned_buffers import changing_memory
from ..runtime.several_devices.parameter_groups import ParameterGroup, ShardedParameters
from .layers import owners

# Of the model that DeepSpeed was given: what is being gathered ahead of time, and what to wait for.
REGISTRY = "ds_inflight_param_registry"
# Numbers in a bucket of gradients, the default of `reduce_bucket_size`.
BUCKET = 500_000_000
MODULE = "deepspeed.runtime.zero.partition_parameters"


def sharded(model: nn.Module) -> ShardedParameters | None:
    """The groups of a model whose parameters DeepSpeed has partitioned; None if it has not."""
    if MODULE not in sys.modules:
        return None
    groups: dict[str, list[Any]] = {}
    seen: set[int] = set()
    for name, module in owners(model):
        for parameter in module.parameters():
            if hasattr(parameter, "ds_tensor") and id(parameter) not in seen:
                seen.add(id(parameter))
                groups.setdefault(name, []).append(parameter)
    if not groups:
        return None
    found = (getattr(m, REGISTRY) for m in model.modules() if hasattr(m, REGISTRY))
    on_their_way: Any = next(found, {})
    made = [ZeRO3Group(name, parameters, on_their_way) for name, parameters in groups.items()]
    return ShardedParameters(made, lambda: _without_hooks(model), _buckets(made))


def _buckets(groups: Sequence[ZeRO3Group]) -> Buckets:
    """As DeepSpeed fills them; the size of a bucket is known to its optimizer, here it is the default."""
    limit = BUCKET * max(p.element_size() for group in groups for p in group.parameters())
    return Buckets(groups[0].devices, (limit, limit), closes_before=True, scattered=True)


class ZeRO3Group(ParameterGroup):
    """The parameters of a layer, or of another module.

    Args:
        name: of it.
        parameters: that it has.
        on_their_way: parameters that are being gathered, and what waits for them.
    """

    of_caller = False
    in_backward = True
    stays = False
    ahead = True

    def __init__(self, name: str, parameters: Sequence[Any], on_their_way: Any) -> None:
        self.name, self._on_their_way = name, on_their_way
        # compiled graphs hold groups, and must not hold the model
        self._weak = [weakref.ref(p) for p in parameters]

    @property
    def _params(self) -> list[Any]:
        return [p for p in (reference() for reference in self._weak) if p is not None]

    @property
    def devices(self) -> int:  # type: ignore[override]
        """How many store a piece."""
        return max(torch.distributed.get_world_size(p.ds_process_group) for p in self._params)

    def parameters(self) -> Sequence[Tensor]:
        """The parameters, in full size between `open` and `close`."""
        return self._params

    def open(self) -> None:
        """See `ParameterGroup`."""
        self._partition()  # what a step that failed has left
        for parameter in self._params:
            changing_memory[parameter] = True
            if _is_away(parameter):
                _without_memory(parameter)

    def close(self) -> None:
        """See `ParameterGroup`."""
        for parameter in self._params:
            if _is_away(parameter):
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def abandon(self) -> None:
        """See `ParameterGroup`."""
        self._partition()

    def begin(self, backward: bool) -> None:
        """See `ParameterGroup`."""
        away = [p for p in self._params if _is_away(p)]
        if away:
            handle = away[0].all_gather_coalesced(away)
            self._on_their_way.update(dict.fromkeys(away, handle))

    def take(self) -> None:
        """See `ParameterGroup`."""
        self.begin(backward=False)
        self._wait()

    def give_back(self) -> None:
        """See `ParameterGroup`."""
        for parameter in self._partition():
            _without_memory(parameter)

    def before_backward(self, read: bool) -> None:
        """See `ParameterGroup`."""
        self.take()

    def after_backward(self) -> None:
        """See `ParameterGroup`. Each gradient has been taken by the hook of its parameter."""
        self._partition()

    def end_of_backward(self) -> None:
        """See `ParameterGroup`."""
        self._partition()

    @property
    def is_there(self) -> bool:
        """See `ParameterGroup`."""
        return all(p.ds_status.name == "AVAILABLE" for p in self._params)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """See `ParameterGroup`."""
        self.take()
        try:
            yield
        finally:
            self._partition()

    def version(self) -> Hashable:
        """See `ParameterGroup`."""
        pieces = [p.ds_tensor for p in self._params]
        return tuple((t._version, t.untyped_storage()._cdata) for t in pieces)

    def gathered_bytes(self) -> int:
        """See `ParameterGroup`; with the padding of pieces of one length."""
        return sum(self._padded(p) * p.element_size() for p in self._params)

    def reduced_bytes(self, parameter: Tensor) -> int:
        """0 bytes: gradients are summed in buckets."""
        return 0

    def _padded(self, parameter: Any) -> int:
        return int(parameter.ds_tensor.ds_numel) * self.devices

    def piece(self, parameter: Tensor) -> Tensor:
        """See `ParameterGroup`."""
        found: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        return found.detach()

    def _wait(self) -> None:
        """For what is on its way."""
        for parameter in self._params:
            if parameter in self._on_their_way:
                self._on_their_way.pop(parameter).wait()

    def _partition(self) -> list[Any]:
        """Let go what is there, but for what DeepSpeed keeps on all devices."""
        self._wait()
        there = [p for p in self._params if not _is_away(p) and not p.ds_persist]
        if there:
            there[0].partition(there)
        return there


def _is_away(parameter: Any) -> bool:
    return bool(parameter.ds_status.name == "NOT_AVAILABLE")


def _without_memory(parameter: Any) -> None:
    """Full size, and no memory."""
    made = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")
    shell = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    shell.set_(shell.untyped_storage(), 0, made.shape, made.stride())  # type: ignore[call-overload]
    shell.untyped_storage().resize_(0)
    parameter.data = shell


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Within: no module within the model has a hook of DeepSpeed's, or its table of parameters, which gathers
    what is asked for; and `torch.nn.functional.linear` is PyTorch's.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    restore: list[tuple[Any, Any]] = []
    tables: list[tuple[nn.Module, Any]] = []
    linear = torch.nn.functional.linear
    theirs = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    try:
        if theirs is not None and _is_theirs(linear):
            torch.nn.functional.linear = theirs
        for module in model.modules():
            tables.append((module, module._parameters))
            module._parameters = dict(module._parameters.items())
            for table in (module._forward_pre_hooks, module._forward_hooks) if module is not model else ():
                own = [key for key, hook in table.items() if _is_theirs(hook)]
                restore += [(table, list(table.items()))] * bool(own)
                for key in own:
                    del table[key]
        yield
    finally:
        torch.nn.functional.linear = linear
        for module, parameters in tables:
            module._parameters = parameters
        for table, before in restore:
            table.clear()
            table.update(before)


def _is_theirs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("deepspeed.")
