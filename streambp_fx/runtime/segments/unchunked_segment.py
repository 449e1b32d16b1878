"""A segment that runs unchunked: plain checkpointing, on eager autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...passes.graph.subgraph import Subgraph
from .failures import refuse_other_backwards
from .owned_buffers import OwnedBuffers, as_it_is


class UnchunkedSegment(torch.autograd.Function):
    """Runs a subgraph without a graph; runs it again with one in backward.

    Inputs after `part` and `owned` are all inputs of its module, tensors or not.
    """

    @staticmethod
    def forward(ctx: Any, part: Subgraph, owned: OwnedBuffers, *inputs: Any) -> tuple[Tensor, ...]:
        """Outputs of the part, run without a graph; those in `part.frozen` have no gradient.

        Args:
            owned: where gradients are noted that nobody else holds, see NOTE [reusing gradient buffers].
        """
        UnchunkedSegment.remember(ctx, part.module, part.random, inputs)
        ctx.owned = None if part.has_own_gradients else owned
        outputs = list(part.module(*inputs))
        for position in part.returned:
            outputs[position] = _by_itself(outputs, position, inputs)
        ctx.mark_non_differentiable(*(outputs[k] for k in part.frozen))
        ctx.set_materialize_grads(False)  # where no gradient comes from, eager leaves None
        return tuple(outputs)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Gradients of the inputs; the part is run again for them."""
        return (None, None, *UnchunkedSegment.pull_back(ctx, 2, gradients))

    @staticmethod
    def remember(ctx: Any, module: GraphModule, random: bool, inputs: tuple[Any, ...]) -> None:
        """Save what a recompute of `module` on `inputs` needs."""
        ctx.module = module
        ctx.random_state = torch.get_rng_state() if random else None
        ctx.cuda_state = torch.cuda.get_rng_state_all() if random and torch.cuda.is_available() else None
        ctx.positions = [k for k, v in enumerate(inputs) if isinstance(v, Tensor)]
        ctx.others = [None if isinstance(v, Tensor) else v for v in inputs]
        ctx.made = [isinstance(v, Tensor) and not v.is_leaf for v in inputs]
        ctx.owned = None
        ctx.save_for_backward(*(as_it_is(inputs[k]) for k in ctx.positions))

    @staticmethod
    def pull_back(ctx: Any, first: int, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the inputs, each in the shape and dtype of its input; None where none is wanted.

        Args:
            ctx: of the autograd function.
            first: position among its arguments from which on they are the inputs.
            gradients: of the outputs, in their shapes and dtypes; None: no gradient comes.
        """
        refuse_other_backwards(gradients)
        inputs = list(ctx.others)
        wanted = []
        for position, saved in zip(ctx.positions, ctx.saved_tensors, strict=True):
            needs = ctx.needs_input_grad[position + first]
            inputs[position] = saved.detach().requires_grad_(needs)
            if needs:
                wanted.append(position)
        with torch._C._DisableAutocast():
            found = _differentiate(ctx, inputs, wanted, gradients)
        result: list[Tensor | None] = [None] * len(inputs)
        for position, gradient in zip(wanted, found, strict=True):
            result[position] = gradient
        others = (*result, *gradients, *inputs)
        for gradient in (g for g, made in zip(result, ctx.made, strict=True) if made and g is not None):
            if ctx.owned is not None and _is_alone(gradient, others):
                ctx.owned.add(gradient)
        return result


def _by_itself(outputs: list[Tensor], position: int, inputs: tuple[Any, ...]) -> Tensor:
    """What the user is given may be changed in place: a copy if it shares memory with something else."""
    value = outputs[position]
    others = [v for k, v in enumerate((*outputs, *inputs)) if k != position and isinstance(v, Tensor)]
    storage = value.untyped_storage()._cdata
    return value.clone() if any(v.untyped_storage()._cdata == storage for v in others) else value


def _is_alone(tensor: Tensor, among: Iterable[Any]) -> bool:
    """True if a tensor shares its memory with no other of these."""
    others = [x for x in among if isinstance(x, Tensor) and x is not tensor]
    if any(x.layout is not torch.strided for x in (tensor, *others)):  # it has no memory of its own
        return False
    memory = tensor.untyped_storage()._cdata
    return all(x.untyped_storage()._cdata != memory for x in others)


def _differentiate(ctx: Any, inputs: list, wanted: list[int], gradients: tuple) -> tuple:
    with torch.random.fork_rng(enabled=ctx.random_state is not None), torch.enable_grad():
        if ctx.random_state is not None:
            torch.set_rng_state(ctx.random_state)
            if ctx.cuda_state is not None:
                torch.cuda.set_rng_state_all(ctx.cuda_state)
        outputs = ctx.module(*inputs)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return (None,) * len(wanted)
        roots, cotangents = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, [inputs[k] for k in wanted], cotangents, allow_unused=True)
