"""Numbers that are made of a size, as operands: harmless where they only say how large a result is."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.facts import Facts, NotSeparable, operands

aten = torch.ops.aten

# The argument of an op that may hold such a number: the sizes of its result.
SHAPES = {
    aten.view.default: 1, aten.reshape.default: 1, aten._unsafe_view.default: 1, aten.expand.default: 1,
    aten.broadcast_to.default: 1, aten.unflatten.int: 2, aten.new_ones.default: 1, aten.new_zeros.default: 1,
    aten.new_full.default: 1, aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
}  # fmt: skip


def mentions(facts: Facts, node: Node) -> bool:
    """True for a number that is made of the size that the facts are about."""
    value = node.meta.get("val")
    numbers = torch.SymInt | torch.SymFloat | torch.SymBool
    return isinstance(value, numbers) and facts.sequence in value.node.expr.free_symbols


def check_sizes(facts: Facts, node: Node, name: str) -> None:
    """Refuse an op that computes with the size, where this is not merely a size of its result.

    Args:
        name: what to call the size in the error, "batch size".

    Raises:
        NotSeparable: the size is an operand.
    """
    numbers = [n for n in operands(node) if mentions(facts, n)]
    allowed: list[Node] = []
    if node.target in SHAPES and len(node.args) > SHAPES[node.target]:
        torch.fx.node.map_arg(node.args[SHAPES[node.target]], allowed.append)
    if any(n not in allowed for n in numbers):
        raise NotSeparable(f"it computes with the {name} ({node.target})")
