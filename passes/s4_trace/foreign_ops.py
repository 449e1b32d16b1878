"""Ops of other packages in a chunk program: differentiated by autograd, as their authors registered it.

NOTE [ops of other packages]: what `torch.library.register_autograd` makes of a backward is no function that
`torch.func` can differentiate. So such an op becomes one whose backward runs the op once more, under
autograd, and takes the gradient from there. Of the second run nothing stays in the program but what the
backward reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..graph.determinism import TAGGED


def is_foreign(target: Any) -> bool:
    """True for an op of another package."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in TAGGED


def call_foreign(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an op of another package makes of its operands, differentiable under `torch.func`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor)]

    def call(tensors: Any) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        again, named = pytree.tree_unflatten(given, spec)
        return op(*again, **named)

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(*tensors: Tensor) -> Any:
            return call(tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            results = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*(t for t in results if not _is_differentiable(t)))

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return _gradients(call, ctx.saved_tensors, gradients)

    return Apply.apply(*(leaves[k] for k in places))


def _gradients(call: Any, tensors: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    """Of each tensor the gradient, or None, from those of the results."""
    with torch.enable_grad():
        own = [t.detach().requires_grad_(_is_differentiable(t)) for t in tensors]
        output = call(own)
    pairs = [
        (t, g)
        for t, g in zip(output if isinstance(output, tuple) else (output,), gradients, strict=True)
        if isinstance(t, Tensor) and t.requires_grad and g is not None
    ]
    wanted = [t for t in own if t.requires_grad]
    found = iter(torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in own)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
