"""What an op does besides making a value: it draws random numbers, or it has an effect."""

from __future__ import annotations

import torch
from torch.fx import Node

from .determinism import is_deterministic
from .functionalization import changes_something, drops_nothing
from .op_arguments import arguments, sdpa_arguments


def is_random(node: Node) -> bool:
    """True for an op that draws random numbers, or of which nobody knows that it does not.

    Of PyTorch's own ops a tag says that one may, and its arguments that it does. An op of another package
    draws none if it has a rule, or is known to be a function of its operands.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "draws", False)  # a function that is one node knows it
    if is_deterministic(node.target):
        return False
    if node.target is torch.ops.aten.dropout.default:
        return not drops_nothing(**arguments(node))
    attention = node.target is torch.ops.aten.scaled_dot_product_attention.default
    return not attention or sdpa_arguments(node)["dropout_p"] != 0


def is_impure(node: Node) -> bool:
    """True for a node that must stay though nobody reads it. A random op that nobody reads may go."""
    return node.op in ("placeholder", "output") or changes_something(node)
