"""Rows put in the places of a mask (`masked_scatter`), as rows that are looked up.

Where a row is taken from depends on how many places come before it, in all of the batch: on the mask alone,
which has no gradient, and so is counted once. What is looked up is then each row's own.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graph.facts import shape_of
from ..graph.op_arguments import arguments
from .normalize import insert, rewrite

aten = torch.ops.aten


@rewrite(aten.masked_scatter.default)
def looked_up(graph: Graph, node: Node) -> Node | None:
    """`x.masked_scatter(mask, rows)` -> `where(mask, embedding(rows, how many places there were), x)`.

    For x (..., length, width), a mask (..., length, 1) and rows (n, width). The first row that is looked up
    is one of zeros, for places that take none: with more places than rows the lookup fails, as the op does.
    """
    call = arguments(node)
    value, mask, rows = call["self"], _narrow(call["mask"]), call["source"]
    sizes, source = shape_of(value), shape_of(rows)
    if mask is None or len(sizes) not in (2, 3) or len(source) < 2 or source[-1] != sizes[-1]:
        return None
    if shape_of(mask) != (*sizes[:-1], 1):
        return None
    add = lambda op, *args: insert(graph, node, op, *args)  # noqa: E731
    rows = add(aten.flatten.using_ints, rows, 0, len(source) - 2) if len(source) > 2 else rows
    ones = add(aten.to.dtype, mask, torch.long)
    length = len(sizes) - 2
    place = add(aten.cumsum.default, ones, length)
    if length:
        counts = add(aten.sum.dim_IntList, ones, [length], True)
        before = add(aten.sub.Tensor, add(aten.cumsum.default, counts, 0), counts)
        place = add(aten.add.Tensor, place, before)
    place = add(aten.squeeze.dim, add(aten.mul.Tensor, place, ones), -1)
    none = add(aten.new_zeros.default, rows, [1, sizes[-1]])
    table = add(aten.cat.default, [none, rows])
    return add(aten.where.self, mask, add(aten.embedding.default, table, place), value)


def _narrow(mask: Node) -> Node | None:
    """A mask before it was spread over the width of the rows."""
    while mask.target in (aten.expand.default, aten.expand_as.default, aten.to.device, aten.to.dtype):
        before = mask.args[0]
        if before.meta["val"].dtype != mask.meta["val"].dtype:  # type: ignore[union-attr]
            break
        mask = before  # type: ignore[assignment]
    return mask if len(shape_of(mask)) and shape_of(mask)[-1] == 1 else None
