"""What a recurrence holds while it runs, besides what it is given and returns.

Nobody can read that from its op. It is run on tensors without memory, with two numbers of rows, and what is
alive at once is taken to grow evenly with the rows, and with the samples.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..graph.facts import expression, tensors_of
from ..graph.recurrence import KERNELS, RECURRENCES
from .live_bytes import LiveBytes

#: Rows that are tried: whole numbers of the blocks that such functions have.
FEW, MANY = 512, 1024


def inner_bytes(node: Node) -> sympy.Expr:
    """Bytes that an op of a recurrence holds at most, over its operands and results; 0 for all others."""
    if node.target not in KERNELS:
        return sympy.S.Zero
    known = RECURRENCES[node.args[0]]  # type: ignore[index]
    shape = [expression(s) for s in tensors_of(node.args[1][known.like])[0].shape]  # type: ignore[index]
    rows = shape.pop(known.rows)
    few, many = (_bytes_of(node, rows, number) for number in (FEW, MANY))
    samples = sympy.Mul(*(s for s in shape if not s.is_Integer))
    return (few + sympy.Rational(many - few, MANY - FEW) * (rows - FEW)) * samples


def _bytes_of(node: Node, rows: sympy.Expr, number: int) -> int:
    """The same with a number for the rows, and one sample."""

    def alike(value: Node) -> Tensor:
        sizes = [expression(s) for s in tensors_of(value)[0].shape]
        shape = [number if s == rows else int(s) if s.is_Integer else 1 for s in sizes]
        return torch.empty(shape, dtype=tensors_of(value)[0].dtype, device="meta")

    args = torch.fx.node.map_arg(node.args, alike)
    given = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    with LiveBytes(given) as meter:
        made: Any = KERNELS[node.target](*args)
    storages = (x.untyped_storage() for x in torch.utils._pytree.tree_leaves(made))
    return max(0, meter.peak - sum({s._cdata: s.nbytes() for s in storages}.values()))
