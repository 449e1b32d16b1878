"""Gradient checkpointing: off in a streamed step, which recomputes by itself, and on in an unstreamed one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..dynamo.hooks import Hooks
from ..errors import warn
from ..runtime.step_kinds import Draws

# The switch that transformers has on its layers.
SWITCH = "gradient_checkpointing"
# Hooks on embeddings that checkpointing needs (transformers', PEFT's and TRL's begin with this name).
HOOK = "make_inputs_require_grad"
TAKEN_OVER = (
    "gradient checkpointing is on as well. The streamed step takes over: it recomputes each layer itself, "
    "once, and checkpointing stays off in it. To be rid of this warning, switch it off: "
    "activation_checkpointing=False in TrainingArguments, which transformers before 5.23 calls "
    "gradient_checkpointing=False."
)


class TakeOver:
    """Switches checkpointing off while a streamed step runs, and says so once.

    NOTE [checkpointing flips]: trainers switch it off and on again around a reference model's step, with a
    new function and one more hook on the embeddings each time. A graph that was captured with them would be
    captured again in every step.

    NOTE [hooks without checkpointing]: such a hook stays on the embeddings of a model whose user switched
    checkpointing off, or never on (`enable_input_require_grads`). It marks a value so that checkpointed
    layers get a gradient, which is nothing to a streamed step, and Dynamo refuses it: it is off in any case.
    """

    def __init__(self) -> None:
        self._said = False

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        """Within: no layer of `model` checkpoints itself, nor is marked for it. Afterwards: as before."""
        on = [m for m in model.modules() if getattr(m, SWITCH, False) is True]
        if on and not self._said:
            self._said = True
            warn(TAKEN_OVER)
        hooked = [(m._forward_hooks, dict(m._forward_hooks)) for m in model.modules() if _is_hooked(m)]
        for module in on:
            setattr(module, SWITCH, False)
        for hooks, _ in hooked:
            for key in [k for k, h in hooks.items() if _is_for_checkpointing(h)]:
                del hooks[key]
        try:
            yield
        finally:
            for hooks, before in hooked:
                hooks.clear()
                hooks.update(before)
            for module in on:
                setattr(module, SWITCH, True)


# Where the classes of a model's modules may come from for its layers to be computed twice unasked.
AUTHORS = ("transformers", "torch", "peft")
FUNCTION = "_gradient_checkpointing_func"


def may_be_checkpointed(model: nn.Module) -> bool:
    """True if the layers of a model can be computed a second time in the backward.

    NOTE [unstreamed steps are checkpointed]: what cannot be streamed takes more memory than with gradient
    checkpointing. So it is switched on for such a step, where the model's authors say that its layers can be
    computed twice, and nobody else has put something in between: a hook, or a module of their own. A layer
    whose forward changes a buffer (statistics, the vectors of a spectral norm) is not, see `_once_or_twice`.
    """
    if not getattr(model, "supports_gradient_checkpointing", False) or Hooks(model):
        return False
    return all(map(_is_theirs, model.modules()))


def _is_theirs(module: nn.Module) -> bool:
    """True if class and forward of a module are of `AUTHORS`, a streamed forward in its place aside."""
    own = getattr(vars(module).get("forward"), "original", vars(module).get("forward"))
    places = [type(module).__module__, getattr(type(module).forward, "__module__", "")]
    places += [] if own is None else [getattr(own, "__module__", "")]
    return all((place or "").split(".")[0] in AUTHORS for place in places)


@contextlib.contextmanager
def layers_checkpointed(model: nn.Module) -> Iterator[None]:
    """Within: the layers of `model` checkpoint themselves, as after `gradient_checkpointing_enable`."""
    within = {m for layer in model.modules() if _is_layer(layer) for m in layer.modules() if m is not layer}
    off = [m for m in model.modules() if getattr(m, SWITCH, None) is False and m not in within]
    before = [(m, {n: vars(m)[n] for n in (SWITCH, FUNCTION) if n in vars(m)}) for m in off]
    for module in off:
        setattr(module, SWITCH, True)
        setattr(module, FUNCTION, functools.partial(_once_or_twice, module))
    try:
        yield
    finally:
        for module, own in before:
            for name in (SWITCH, FUNCTION):
                vars(module).pop(name, None)
            vars(module).update(own)


def _once_or_twice(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A checkpointed call, unless it changes a buffer: then the layer runs once, as in eager.

    Whether it does is seen afterwards. What it has changed is put back then, and so are random numbers.
    """
    among = (getattr(function, "__self__", None), *getattr(function, "args", ()))
    layer = next((m for m in among if isinstance(m, nn.Module)), module)
    before = {place: (b, b._version, b.clone()) for place, b in _buffers(layer).items()}
    draws = Draws(args)
    result = checkpoint(function, *args, use_reentrant=False, **kwargs)
    after = _buffers(layer)
    changed = [p for p, (b, version, _) in before.items() if after.get(p) is not b or b._version != version]
    if not changed and after.keys() == before.keys():
        return result
    for m, name in after.keys() - before.keys():
        del m._buffers[name]
    with torch.no_grad():
        for m, name in changed:
            buffer, _, value = before[m, name]
            m._buffers[name] = buffer.copy_(value)
    draws.restore()
    return function(*args, **kwargs)


def _buffers(layer: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """The buffers of a layer, by the module that has them and their name there."""
    return {(m, n): b for m in layer.modules() for n, b in m._buffers.items() if b is not None}


def layers_of(model: nn.Module) -> int:
    """How many layers checkpoint themselves, each alone."""
    return sum(map(_is_layer, model.modules()))


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


def _is_hooked(module: nn.Module) -> bool:
    return any(_is_for_checkpointing(h) for h in module._forward_hooks.values())


def _is_for_checkpointing(hook: Any) -> bool:
    """True for a hook that has the name, and calls nothing but `requires_grad_`."""
    called = getattr(getattr(hook, "__code__", None), "co_names", ())
    return getattr(hook, "__name__", "").startswith(HOOK) and called == ("requires_grad_",)
