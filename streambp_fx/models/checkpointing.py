"""Gradient checkpointing that somebody switched on as well: a streamed step recomputes by itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import StreamBPWarning

# The switch that transformers has on its layers.
SWITCH = "gradient_checkpointing"
# Hooks on embeddings that checkpointing needs (transformers', PEFT's and TRL's begin with this name).
HOOK = "make_inputs_require_grad"
TAKEN_OVER = (
    "gradient checkpointing is on as well. The streamed step takes over: it recomputes each layer itself, "
    "once, and checkpointing stays off in it. To be rid of this warning: gradient_checkpointing=False."
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
            warnings.warn(TAKEN_OVER, StreamBPWarning, stacklevel=6)
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


def _is_hooked(module: nn.Module) -> bool:
    return any(_is_for_checkpointing(h) for h in module._forward_hooks.values())


def _is_for_checkpointing(hook: Any) -> bool:
    """True for a hook that has the name, and calls nothing but `requires_grad_`."""
    called = getattr(getattr(hook, "__code__", None), "co_names", ())
    return getattr(hook, "__name__", "").startswith(HOOK) and called == ("requires_grad_",)
