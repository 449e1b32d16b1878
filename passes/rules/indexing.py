"""Lookups: embeddings, gathers and constant index lists."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import COLUMN_AXIS, ROW_AXIS, Kind, Layout, Mixing, NotSeparable, Role, shape_of
from ..graph.op_arguments import arguments
from .registry import RuleContext, forbid, merge_aligned, merge_axis, normalize_dim, rule

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(ctx: RuleContext, node: Node) -> Layout:
    """A table looked up by rows: the rows are those of the ids."""
    call = arguments(node)
    if ctx.facts.carries(call["weight"]):
        raise NotSeparable("the table of a lookup carries the sequence")
    if call["scale_grad_by_freq"] and node in ctx.facts.needs_grad:
        raise NotSeparable("a lookup whose gradient counts how often the sequence has an id")
    if call["sparse"] and node in ctx.facts.needs_grad:
        raise NotSeparable("a lookup whose gradient is sparse")
    return (*ctx.layout(call["indices"]), None)


@rule(aten.one_hot.default)
def one_hot(ctx: RuleContext, node: Node) -> Layout:
    """A vector for each number, of as many entries as are asked for."""
    call = arguments(node)
    if not isinstance(call["num_classes"], int) or call["num_classes"] < 0:
        raise NotSeparable("a one_hot whose width depends on all rows")
    return (*ctx.layout(call["self"]), None)


@rule(aten.gather.default)
def gather(ctx: RuleContext, node: Node) -> Layout:
    """An element of each row, at an index that has the same rows.

    The elements may be columns, all of which are there: see NOTE [columns that are selected].
    """
    call = arguments(node)
    if ctx.facts.kind(call["index"]) is Kind.SQUARE:
        return _columns_of_data(ctx, node, call)
    layout, wanted = ctx.layout(call["self"]), ctx.layout(call["index"])
    if len(layout) != len(wanted):
        raise NotSeparable("a gather from a number")
    dim = normalize_dim(call["dim"], len(layout))
    forbid(layout, [dim], "a gather along", Role.ROW)
    forbid(wanted, [dim], "a gather along", Role.ROW)
    for first, second in (pair for d, pair in enumerate(zip(layout, wanted, strict=True)) if d != dim):
        if (first is None) != (second is None):
            raise NotSeparable("a gather whose index does not carry the sequence where its source does")
        merge_axis(first, second)
    return wanted


def _columns_of_data(ctx: RuleContext, node: Node, call: dict[str, Any]) -> Layout:
    """What data of rows and columns picks from each row, a bias by distance say, has these columns.

    They come into being here, as scores do in a product, and are followed as those are.

    Raises:
        NotSeparable: the data has the sequence in other dims than the rows and what is picked from.
    """
    layout, index = ctx.layout(call["self"]), call["index"]
    dim = normalize_dim(call["dim"], len(layout))
    rows = [d for d, axis in enumerate(layout) if axis is not None]
    of_sequence = [d for d, size in enumerate(shape_of(index)) if ctx.facts.sequence in size.free_symbols]
    if [layout[d] for d in rows] != [ROW_AXIS] or dim in rows or of_sequence != sorted([*rows, dim]):
        raise NotSeparable("a gather by data whose rows and columns are not those of its source")
    ctx.seen.add(index)
    ctx.mixes(Mixing(node, columns=()))
    return tuple(COLUMN_AXIS if d == dim else axis for d, axis in enumerate(layout))


@rule(aten.index_select.default)
def index_select(ctx: RuleContext, node: Node) -> Layout:
    """Entries of a dim without the sequence: rows stay rows."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    forbid(layout, [normalize_dim(call["dim"], len(layout))], "an index along")
    if ctx.facts.carries(call["index"]):
        raise NotSeparable("an index that carries the sequence")
    return layout


@rule(aten.index.Tensor)
def index(ctx: RuleContext, node: Node) -> Layout:
    """A constant index on dims without the sequence; a table looked up by rows."""
    source, indices = node.args[:2]
    layout = ctx.layout(source)
    used = [d for d, i in enumerate(indices) if i is not None]
    tables = [indices[d] for d in used]
    forbid(layout, used, "an index along")
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in tables):
        raise NotSeparable("an index by a mask")
    if any(ctx.facts.kind(i) is Kind.SQUARE for i in tables) and not ctx.places:
        raise NotSeparable("an index of sequence by sequence")
    if not used or used != list(range(used[0], used[0] + len(used))):
        raise NotSeparable("an index on dims that are not next to each other")
    looked_up: list = [None] * max(i.meta["val"].dim() for i in tables)
    for table in tables:
        merge_aligned(looked_up, ctx.layout(table), shape_of(table))
    if any(a is not None for a in looked_up) and any(a is not None for a in layout):
        raise NotSeparable("an index by rows into a value that has rows")
    return (*layout[: used[0]], *looked_up, *layout[used[-1] + 1 :])
