"""Running training steps on a model that must be left exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..transform import untransformed


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Within: an untransformed, uncompiled model in training mode, without gradients and without dropout.

    Afterwards, and after an error, forward, modes, gradients, buffers, hooks on gradients, probabilities of
    dropout and the random state are the same objects and values as before.

    Yields:
        names of what was switched off, as "Dropout.p = 0.1".
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_state(model))
        stack.enter_context(_forwards(model))
        stack.enter_context(_modes(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(buffers_put_back(model))
        yield stack.enter_context(_without_dropout(model))


@contextlib.contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


@contextlib.contextmanager
def _forwards(model: nn.Module) -> Iterator[None]:
    """The original forward, whether the model was transformed or compiled in place (`model.compile()`)."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with untransformed(model):
            yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


@contextlib.contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Training mode; submodules that are in another mode than a training model stay in theirs."""
    modes = {m: m.training for m in model.modules()}
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    """No gradients, and none of the hooks by which optimizers take a step in the middle of a backward."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    hooks = [dict(p._post_accumulate_grad_hooks or {}) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
        if parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for parameter, gradient, own in zip(parameters, gradients, hooks, strict=True):
            parameter.grad = gradient
            if own:
                parameter._post_accumulate_grad_hooks.update(own)  # type: ignore[union-attr]


@contextlib.contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Buffers that a step changes (running statistics, tables that grow) are put back."""
    held = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in held:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                module._buffers[name] = buffer


def _holders(model: nn.Module) -> list[Any]:
    """Modules and configurations, where probabilities of dropout are kept."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := vars(m).get("config")) is not None}
    return [*modules, *configs.values()]


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Every probability of dropout set to 0: in layers of dropout, and in attributes that are called so."""
    found: list[tuple[Any, str, float]] = []
    for holder in _holders(model):
        layer = isinstance(holder, (nn.modules.dropout._DropoutNd,))
        for name, value in vars(holder).items():
            named = "drop" in name or (layer and name == "p")
            if named and isinstance(value, float) and value > 0:
                found.append((holder, name, value))
    try:
        for holder, name, _ in found:
            setattr(holder, name, 0.0)
        yield tuple(sorted({f"{type(h).__name__}.{n} = {v:g}" for h, n, v in found}))
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)
