"""A value with a part of it replaced: what functionalization makes of changes in place, and scatters."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.facts import Layout, NotSeparable, Role
from ..graph.op_arguments import arguments
from .pointwise import align
from .registry import RuleContext, forbid, normalize_dim, rule, without

aten = torch.ops.aten


@rule(aten.slice_scatter.default)
def slice_scatter(ctx: RuleContext, node: Node) -> Layout:
    """A part of a dim without the sequence is replaced, row by row."""
    base, part, *dim = node.args[:3]
    layout = ctx.layout(base)
    at = normalize_dim(dim[0] if dim else node.kwargs.get("dim", 0), len(layout))
    forbid(layout, [at], "a replacement along")
    return replaced(layout, ctx.layout(part))


@rule(aten.select_scatter.default)
def select_scatter(ctx: RuleContext, node: Node) -> Layout:
    """One entry of a dim without the sequence is replaced, row by row."""
    base, part, dim = node.args[:3]
    layout, given = ctx.layout(base), ctx.layout(part)
    at = normalize_dim(dim, len(layout))
    forbid(layout, [at], "a replacement along")
    return replaced(layout, (*given[:at], None, *given[at:]))


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(ctx: RuleContext, node: Node) -> Layout:
    """The diagonal of two dims without the sequence, the last dim of what replaces it."""
    call = arguments(node)
    layout, given = ctx.layout(call["self"]), ctx.layout(call["src"])
    dims = [normalize_dim(call[d], len(layout)) for d in ("dim1", "dim2")]
    forbid(layout, dims, "a replaced diagonal over")
    forbid(given, [len(given) - 1], "a diagonal of")
    replaced(tuple(axis for dim, axis in enumerate(layout) if dim not in dims), given[:-1])
    return layout


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def scatter(ctx: RuleContext, node: Node) -> Layout:
    """Entries of each row are replaced or added to, at places that have the same rows.

    The places may be columns, all of which are there: see NOTE [columns that are selected].
    """
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    forbid(layout, [dim], "a scatter along", Role.ROW)
    rows = without(layout, dim)
    for operand in (call["index"], call.get("src")):
        if isinstance(operand, Node) and ctx.layout(operand) not in (rows, layout):
            raise NotSeparable("a scatter of something that does not carry the sequence where its base does")
    return layout


def replaced(base: Layout, part: Layout) -> Layout:
    """The layout of a value after a part of it is replaced, which is that of the value and of the part.

    Raises:
        NotSeparable: the two carry the sequence in different dims.
    """
    if base != part:
        raise NotSeparable("a part is replaced by something that does not carry the sequence where it does")
    return base


@rule(aten.fill.Scalar, aten.fill.Tensor, aten.zero.default)
def fill(ctx: RuleContext, node: Node) -> Layout:
    """One number for all elements: rows stay rows."""
    return align(ctx, node, [node.args[0]])
