"""Ops of other packages in a chunk program: differentiated by autograd, as their authors registered it.

NOTE [ops of other packages]: what `torch.library.register_autograd` makes of a backward is no function that
`torch.func` can differentiate. So such an op becomes one whose backward runs the op once more, under
autograd, and takes the gradient from there. Of the second run nothing stays in the program but what the
backward reads.

NOTE [backwards that no program has]: a registered backward may read values of its operands, as where it
loops over the ends of groups, and then it cannot be traced. Such a backward is one op of a program,
`foreign_vjp`: when it runs, the op is run again under autograd, on what it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from ..graph.determinism import TAGGED
from ..graph.functionalization import in_memory_of_their_own
from ..graph.ops.recurrence import autograd_in_kernel

# What op is called, with which arguments beside tensors, by the number that a program has for it.
_calls: list[Callable[[Sequence[Tensor]], Any]] = []

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define("foreign_vjp(int call, Tensor[] operands, Tensor?[] gradients) -> Tensor[]")


def is_foreign(target: Any) -> bool:
    """True for an op of another package."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in TAGGED


def call_foreign(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an op of another package makes of its operands, differentiable under `torch.func`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor)]
    others = [None if isinstance(v, Tensor) else v for v in leaves]

    def call(tensors: Any) -> Any:
        given = list(others)
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
            numbers = not any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in others)
            if numbers and not _has_program(call, ctx.saved_tensors, gradients):
                return _in_one_op(call, ctx.saved_tensors, gradients)
            return _gradients(call, ctx.saved_tensors, gradients)

    return Apply.apply(*(leaves[k] for k in places))


def _has_program(call: Any, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool:
    """False if the backward fails on fake tensors: it reads values, which a trace does not have.

    If it fails for another reason, it fails again when the step runs, and says so there.
    """
    sizes: Iterator[Any] = (size for t in tensors for size in t.shape if isinstance(size, torch.SymInt))
    shapes = next((size.node.shape_env for size in sizes), None)
    unseen = contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    with disable_proxy_modes_tracing(), unseen:
        try:
            _gradients(call, tensors, gradients)
        except Exception:  # whatever somebody's code makes of a number that is a symbol
            return False
    return True


def _in_one_op(
    call: Any, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """As `_gradients`, by `foreign_vjp`."""
    _calls.append(call)
    found = iter(torch.ops.streambp_fx.foreign_vjp(len(_calls) - 1, tensors, gradients))
    return tuple(next(found) if _is_differentiable(t) else None for t in tensors)


def _vjp(call: int, operands: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Of each differentiable operand the gradient."""
    with autograd_in_kernel():
        found = _gradients(_calls[call], operands, gradients)
    wanted = [(x, g) for x, g in zip(operands, found, strict=True) if _is_differentiable(x)]
    values = (torch.zeros_like(x) if g is None else g for x, g in wanted)
    return in_memory_of_their_own(values, [*operands, *(g for g in gradients if g is not None)])


def _fake_vjp(call: int, operands: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    wanted = [x for x in operands if _is_differentiable(x)]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]


_LIBRARY.impl("foreign_vjp", _vjp, "CompositeExplicitAutograd")
torch.library.register_fake("streambp_fx::foreign_vjp", _fake_vjp, lib=_LIBRARY)


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
