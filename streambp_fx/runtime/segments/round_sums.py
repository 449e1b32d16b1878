"""The sum of a gradient in a wider dtype becomes the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Elements that are rounded in memory of their own, before there is room in front of the rest.
FIRST = 1 << 16


def rounded(total: Tensor, dtype: torch.dtype, in_place: bool = False) -> Tensor:
    """A sum in the dtype of what it is the gradient of.

    NOTE [rounded in place]: the float32 sum of a bfloat16 weight takes twice the bytes of its gradient, and a
    head's is often the largest tensor of a step, so the two are not held together: the gradient is written
    over the front of the sum. Element k is written where k // 2 was, so elements up to twice those that are
    written already can be rounded at once. The result keeps the memory of the sum alive, so this is for
    gradients that are added to one that is there, and gone at once: see `is_added`. (A hook that keeps such a
    gradient, or `torch.autograd.grad`, keeps twice the bytes; the values are the same.)

    Args:
        total: the sum, contiguous where `in_place`; nobody reads it afterwards.
        dtype: of the gradient, at most half as wide as the sum's where `in_place`.
        in_place: write it into the memory of the sum.
    """
    if not in_place or dtype == total.dtype:
        return total.to(dtype)
    values = total.view(-1)
    found = values.view(dtype)[: len(values)]
    start, end = 0, min(FIRST, len(values))
    found[:end] = values[:end].to(dtype)
    while end < len(values):
        start, end = end, min(2 * end, len(values))
        found[start:end] = values[start:end]
    return found.view(total.shape)


def is_added(function: Any, position: int) -> bool:
    """True if the gradient of an input is added to the `grad` of a leaf that has one.

    Args:
        function: the autograd node whose backward makes the gradient.
        position: of the input among those that are tensors.
    """
    following = function.next_functions[position][0]
    leaf = getattr(following, "variable", None)
    return leaf is not None and leaf.grad is not None
