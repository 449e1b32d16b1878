"""In which order gradients of parameters come, which is the order of DistributedDataParallel's buckets.

NOTE [order of arrival]: a segment hands over the gradients of its parameters at once, and autograd then
accumulates them one by one, in an order of its own. It is found by asking autograd: the same nodes, one for
each segment, with one number in the place of each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def arrival(handed_over: Sequence[Sequence[Node]]) -> list[Node]:
    """The parameters in the order in which their gradients are accumulated.

    Args:
        handed_over: those whose gradients come from one segment, in the order of the backward.
    """
    found: list[Node] = []

    def note(node: Node) -> Any:
        return lambda parameter: found.append(node)

    with torch.enable_grad():
        value = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        for nodes in reversed(handed_over):
            stand_ins = [torch.zeros_like(value, requires_grad=True) for _ in nodes]
            for node, stand_in in zip(nodes, stand_ins, strict=True):
                stand_in.register_post_accumulate_grad_hook(note(node))
            value = _Segment.apply(value, *stand_ins)
        value.backward()
    return found


class _Segment(torch.autograd.Function):
    """A node with the inputs of a segment."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (gradient, *(gradient.clone() for _ in range(ctx.count)))
