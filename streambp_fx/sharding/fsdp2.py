"""FSDP2 (`torch.distributed.fsdp.fully_shard`): the groups of a model, by what its hooks call.

What is called has been there since 2.6:
`FSDPState._pre_forward`, `_post_forward` and `_pre_backward`, `FSDPParamGroup.post_backward`, and of
`FSDPParam` what makes a parameter of full size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..runtime.several_devices.parameter_groups import NotSupported, ParameterGroup, ShardedParameters
from ..versions.differences import fsdp_groups, reset_fsdp

MODULE = "torch.distributed.fsdp"


def sharded(model: nn.Module) -> ShardedParameters | None:
    """The groups of a model that `fully_shard` was called on, or on parts of it; None if it was not."""
    known = MODULE in sys.modules and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not known:  # no group of processes: the modules need not be asked in each step
        return None
    from torch.distributed.fsdp import FSDPModule

    states: dict[int, tuple[str, nn.Module, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            states.setdefault(id(state), (name, cast(Any, module), state))
    groups = [FSDP2Group(name, module, state, module is model) for name, module, state in states.values()]
    if not groups:
        return None
    return ShardedParameters(groups, failed=partial(_failed, groups), recover=partial(_recover, groups))


class FSDP2Group(ParameterGroup):
    """What one call of `fully_shard` made.

    Args:
        name, module: the module, or the first of several.
        state: what FSDP2 knows of it.
        of_caller: the module is the model itself: its hooks are called around its forward.
    """

    ahead = True

    def __init__(self, name: str, module: nn.Module, state: Any, of_caller: bool) -> None:
        self.name, self.of_caller = name or type(module).__name__, of_caller
        # compiled graphs hold groups, and must not hold the model
        self._weak_module, self._weak_state = weakref.ref(module), weakref.ref(state)
        self._hooks: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []

    @property
    def _module(self) -> Any:
        return self._weak_module()

    @property
    def _state(self) -> Any:
        return self._weak_state()

    @property
    def _groups(self) -> list[Any]:
        return fsdp_groups(self._state)

    @property
    def _params(self) -> list[Any]:
        return [p for g in self._groups for p in g.fsdp_params]

    @property
    def devices(self) -> int:  # type: ignore[override]
        """How many store a piece."""
        return max((_devices(g) for g in self._groups), default=1)

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """How many have the same piece (HSDP)."""
        found = (getattr(g.mesh_info, "replicate_mesh_size", 1) for g in self._groups)
        return max(map(int, found), default=1)

    @property
    def in_backward(self) -> bool:  # type: ignore[override]
        """False for what `set_unshard_in_backward(False)` was called on."""
        return all(g.unshard_in_backward for g in self._groups)

    @property
    def stays(self) -> bool:  # type: ignore[override]
        """True with `reshard_after_forward=False`, which is the default of the model itself."""
        return all(g.post_forward_mesh_info is None for g in self._groups)

    # ---- the model

    def parameters(self) -> Sequence[Tensor]:
        """The parameters in full size; their memory is there between `take` and `give_back`."""
        return [p._unsharded_param for p in self._params]

    def open(self) -> None:
        """See `ParameterGroup`.

        Raises:
            NotSupported: a parameter is not what a graph can read, or the model's own hooks were not called.
        """
        if self.of_caller and not self.is_there:
            raise NotSupported(
                f"the forward of {self.name} is called without the hooks that gather parameters"
            )
        self._state._lazy_init()  # what the first forward does
        for group in self._groups:
            for param in group.fsdp_params:
                _make_unsharded(param, _devices(group), group.device)
                # somebody may have frozen it, or not any more
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)
                param._setattr_on_modules(param._unsharded_param)
        if not self.of_caller:
            self._take_hooks_away()

    def close(self) -> None:
        """See `ParameterGroup`."""
        for table, before in self._hooks:
            table.clear()
            table.update(before)
        self._hooks.clear()
        for group in self._groups:
            for param in group.fsdp_params:
                if group.is_sharded:
                    param._setattr_on_modules(param.sharded_param)

    def abandon(self) -> None:
        """See `ParameterGroup`. What is on its way is waited for, and thrown away."""
        if self.of_caller:
            return  # its hooks are the caller's
        for group in self._groups:
            group.wait_for_unshard()
            group._training_state = type(group._training_state).IDLE
            group.reshard()
        self._state._training_state = type(self._state._training_state).IDLE

    def _take_hooks_away(self) -> None:
        policy = self._state._mp_policy
        before = policy.param_dtype if policy.cast_forward_inputs else None
        own = {handle.id for handle in self._handles()}
        for module in self._state._modules:
            self._replace(module._forward_pre_hooks, own, None if before is None else _before(before))
            after = policy.output_dtype
            self._replace(module._forward_hooks, own, None if after is None else _after(after))

    def _handles(self) -> list[Any]:
        """Of several modules there is one handle for all hooks, of both kinds."""
        handles = self._state._pre_forward_hook_handle, self._state._post_forward_hook_handle
        return [own for handle in handles for own in getattr(handle, "handles", (handle,))]

    def _replace(self, table: dict[int, Any], own: set[int], hook: Any | None) -> None:
        self._hooks.append((table, list(table.items())))
        for key in own.intersection(table):
            if hook is None:
                del table[key]
            else:
                table[key] = hook

    # ---- a step

    def begin(self, backward: bool) -> None:
        """What FSDP2 does for the modules of `set_modules_to_forward_prefetch`.

        It gathers in the background, and not on a stream of FSDP2's: that would hold one buffer more. In the
        backward FSDP2 does so by itself.
        """
        for group in () if backward else self._groups:
            with group.use_training_state(type(group._training_state).FORWARD):
                group.unshard(async_op=True)

    def take(self) -> None:
        """What FSDP2's hook before the forward does, but for casting inputs, which the graph does."""
        self._state._pre_forward(self._module, (), {})

    def give_back(self) -> None:
        """What FSDP2's hook after the forward does, but for casting outputs."""
        self._state._post_forward(self._module, (), None)

    def before_backward(self, read: bool) -> None:
        """What FSDP2's hook on the gradients of the module's outputs does."""
        with self._in_background():
            self._state._pre_backward(None)
        if read and not self.is_there:
            self._module.unshard()

    @contextlib.contextmanager
    def _in_background(self) -> Iterator[None]:
        """Within: what is gathered ahead of time does not keep a CPU waiting.

        FSDP2 leaves that to streams, which a CPU does not have: there it waits for each gather at once.
        """
        groups = [g for state in self._state._state_ctx.all_states for g in fsdp_groups(state)]
        before = [(g, g.unshard_async_op) for g in groups if g.device.type == "cpu"]
        try:
            for group, _ in before:
                group.unshard_async_op = True
            yield
        finally:
            for group, own in before:
                group.unshard_async_op = own

    def after_backward(self) -> None:
        """What FSDP2 does when the gradients of the module's inputs have come."""
        for group in reversed(self._groups):
            group.post_backward()

    def end_of_backward(self) -> None:
        """FSDP2 has seen to it by a callback of its own."""

    # ---- between steps

    @property
    def is_there(self) -> bool:
        """See `ParameterGroup`."""
        return all(g.is_unsharded for g in self._groups)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """See `ParameterGroup`."""
        there = self.is_there
        if not there:
            self._module.unshard()
        try:
            yield
        finally:
            if not there:
                self._module.reshard()

    def version(self) -> Hashable:
        """See `ParameterGroup`."""
        # an optimizer changes the DTensor, `load_state_dict` may change what lies in it
        pieces = [(p.sharded_param, p.sharded_param._local_tensor) for p in self._params]
        return tuple((t._version, own._version, own.untyped_storage()._cdata) for t, own in pieces)

    def gathered_bytes(self) -> int:
        """See `ParameterGroup`; with the padding of pieces of one length."""
        return sum(t.numel() * t.element_size() for p in self._params for t in p.all_gather_outputs)

    def reduced_bytes(self, parameter: Tensor) -> int:
        """See `ParameterGroup`; in the dtype of the sums, with the padding of pieces of one length."""
        for group in self._groups:
            for param in group.fsdp_params:
                if param._unsharded_param is parameter:
                    dtype = group._reduce_dtype or parameter.dtype
                    return sum(t.numel() for t in param.all_gather_outputs) * int(dtype.itemsize)
        raise ValueError(f"{self.name} does not have this parameter")

    def piece(self, parameter: Tensor) -> Tensor:
        """What this device stores of a parameter."""
        (param,) = (p for p in self._params if p._unsharded_param is parameter)
        local: Tensor = param.sharded_param.detach().to_local()
        return local


def _roots(groups: Sequence[FSDP2Group]) -> list[Any]:
    """What FSDP2 knows of the modules that are called first; none before the first forward."""
    contexts = {id(own): own for own in (g._state._state_ctx for g in groups if g._state is not None)}
    return [state for context in contexts.values() for state in context.all_states if state._is_root]


def _failed(groups: Sequence[FSDP2Group], gradients: bool) -> None:
    """See `ShardedParameters`: FSDP2 is as before a forward."""
    for root in _roots(groups):
        reset_fsdp(root)
        below = [group for state in root._state_ctx.all_states for group in fsdp_groups(state)]
        # FSDP2 would add them to those of the next step
        for param in (p for group in below for p in group.fsdp_params) if gradients else ():
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _recover(groups: Sequence[FSDP2Group]) -> None:
    """A backward has begun, and has not ended, and none is running: an error has left it.

    What FSDP2's hook around the model has done on such a state is done once more.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    for root in _roots(groups):
        if root._state_ctx.post_backward_final_callback_queued:
            _failed(groups, gradients=True)
            if all(g.of_caller or g._state is not root for g in groups):
                root._pre_forward(root._modules[0], (), {})


def _devices(group: Any) -> int:
    return int(group.mesh_info.shard_mesh_size) if hasattr(group.mesh_info, "shard_mesh_size") else 1


def _make_unsharded(param: Any, devices: int, device: torch.device) -> None:
    """The parameter of full size, without memory: nothing is gathered for it."""
    if hasattr(param, "_unsharded_param"):
        return
    if hasattr(param._sharded_local_tensor, "fsdp_post_all_gather") or param.is_dtensor:
        raise NotSupported(f"{param._param_fqn} is gathered in a way of its own")
    (given,) = param.all_gather_inputs
    param.init_all_gather_outputs([given.numel()], [given.dtype], devices, device)
    param.init_unsharded_param()
    param.free_unsharded_param()


def _before(dtype: torch.dtype) -> Any:
    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast_inputs


def _after(dtype: torch.dtype) -> Any:
    def cast_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return cast_outputs


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in tuples, lists, dicts and dataclasses, cast as FSDP2 casts them."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if dataclasses.is_dataclass(value) and isinstance(value, dict):  # the outputs of transformers
        return type(value)(**{k: _cast(v, dtype) for k, v in value.items()})
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple | list):
        made = [_cast(v, dtype) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
