"""The registry of mask rules, and what all rules use: aligned operands, arguments of an op, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .elements import (
    MASK_RULES,
    Leaf,
    MaskNotUnderstood,
    MaskRule,
    aligned,
    call,
    leaf_of,
    shape,
)

aten = torch.ops.aten
# Integer arithmetic may be exact in these; whether what it makes fits is looked at (`masks.elements._fits`).
EXACT = (torch.int32, torch.int64)


def mask_rule(
    *ops: Any, operands: Callable = aligned, build: Callable = call
) -> Callable[[Callable], Callable]:
    """Register the decorated element rule, with its block side, for `ops`."""

    def register(element: Callable) -> Callable:
        for op in ops:
            MASK_RULES[op] = MaskRule(element, operands, build)
        return element

    return register


def own(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument `name` of the node's op, whether passed by position, by name or not at all."""
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if not argument.kwarg_only and position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def own_dim(node: fx.Node, name: str = "dim") -> int:
    """The argument `name` as a non-negative dim of the first operand."""
    return own(node, name, 0) % len(shape(node.args[0]))


def scalar_leaf(node: fx.Node, arg: Any) -> Leaf:
    """A number, SymInt or SymInt node among the arguments as a leaf.

    Raises:
        MaskNotUnderstood: it is not a number.
    """
    if isinstance(arg, fx.Node):
        arg = arg.meta.get("val")
    if isinstance(arg, torch.SymInt):
        return arg.node.expr
    if isinstance(arg, (bool, int, float)):
        return leaf_of(arg)
    raise MaskNotUnderstood(node, f"argument {arg} is not a number")


def one_element(value: float | int, dtype: torch.dtype, ndim: int = 0) -> torch.Tensor:
    """A number as a tensor of `ndim` dims of size 1, in a dtype, on the CPU."""
    return torch.full((1,) * ndim, value, dtype=dtype, device="cpu")
