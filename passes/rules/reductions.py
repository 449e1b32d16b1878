"""Reductions and normalisations over dims that do not carry the sequence."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import COLUMN_AXIS, Kind, Layout, NotSeparable, Role, shape_of
from ..graph.op_arguments import arguments
from .registry import RuleContext, forbid, normalize_dim, rule, without
from .row_orders import sorted_rows

aten = torch.ops.aten


def reduced_dims(given: Any, rank: int) -> list[int]:
    """Dims from the argument of a reduction: a number, several, or all if none are named."""
    if given is None or given == []:
        return list(range(rank))
    return [normalize_dim(d, rank) for d in ([given] if isinstance(given, int) else given)]


@rule(
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.dim,
    aten.var.correction, aten.std.dim, aten.std.correction, aten.logsumexp.default, aten.prod.dim_int,
    aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim, aten.max.dim, aten.min.dim,
)  # fmt: skip
def reduce(ctx: RuleContext, node: Node) -> Layout:
    """Over dims without the sequence, or over what a row reads, rows stay rows; over rows it is refused."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dims = reduced_dims(call["dim"], len(layout))
    forbid(layout, dims, "a reduction over", Role.ROW if not _gives_places(node) else None)
    return tuple(None if d in dims else a for d, a in enumerate(layout) if call["keepdim"] or d not in dims)


def _gives_places(node: Node) -> bool:
    """True if the result says where something is: of equal scores a rounding decides which is the largest."""
    second = any(u.target is operator.getitem and u.args[1] == 1 for u in node.users)
    return node.target in (aten.argmax.default, aten.argmin.default) or second


@rule(aten.sum.default, aten.mean.default)
def reduce_all(ctx: RuleContext, node: Node) -> Layout:
    """A sum or mean over everything, of a value that has no rows."""
    forbid(ctx.layout(node.args[0]), list(range(len(ctx.layout(node.args[0])))), "a reduction over")
    return ()


@rule(
    *(aten.softmax.int, aten._softmax.default, aten._safe_softmax.default),
    *(aten.log_softmax.int, aten._log_softmax.default),
)
def softmax(ctx: RuleContext, node: Node) -> Layout:
    """Along a column axis the rows stay apart: each row is normalised over what it reads."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    forbid(layout, [normalize_dim(call["dim"], len(layout))], "a softmax over", Role.ROW)
    return layout


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(ctx: RuleContext, node: Node) -> Layout:
    """Over the last dims, each row by itself."""
    call = arguments(node)
    layout = ctx.layout(call["input"])
    rank = len(call["normalized_shape"])
    forbid(layout, list(range(len(layout) - rank, len(layout))), "a normalisation over")
    return layout


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
def sort(ctx: RuleContext, node: Node) -> Layout:
    """Along a dim without the sequence rows stay rows; sorted rows are in an order of their own.

    Columns may be sorted, see NOTE [columns that are selected].
    """
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    rows = bool(layout) and layout[dim] not in (None, COLUMN_AXIS)
    return sorted_rows(ctx, node) if rows else layout


@rule(aten.cumsum.default, aten.cumprod.default)
def scan(ctx: RuleContext, node: Node) -> Layout:
    """A running sum or product along a dim without the sequence: rows stay rows."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    forbid(layout, [normalize_dim(call["dim"], len(layout))], "a scan along")
    return layout


@rule(aten.topk.default)
def topk(ctx: RuleContext, node: Node) -> Layout:
    """A selection along a dim without the sequence, or of columns: each row selects by itself.

    See NOTE [columns that are selected].
    """
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    forbid(layout, [dim], "a selection along", Role.ROW)
    if layout and shape_of(node)[dim] == shape_of(call["self"])[dim]:
        return layout  # all of them, in another order
    return without(layout, dim)


@rule(operator.getitem)
def getitem(ctx: RuleContext, node: Node) -> Layout:
    """One of several results; they all have the layout of the op, so they have to have as many dims."""
    layout = ctx.layout(node.args[0])
    if len(layout) != len(shape_of(node)):
        raise NotSeparable("a result that has not as many dims as the op's first")
    return layout


@rule(aten.cross_entropy_loss.default)
def cross_entropy(ctx: RuleContext, node: Node) -> Layout:
    """Without a reduction (the normalize pass sees to that) one loss a row."""
    call = arguments(node)
    if call["reduction"] != 0:
        raise NotSeparable("a loss summed over the sequence axis")
    layout, target = ctx.layout(call["self"]), call["target"]
    classes = 0 if len(layout) == 1 else 1
    forbid(layout, [classes], "a loss over")
    rows = tuple(a for d, a in enumerate(layout) if d != classes)
    ctx.seen.add(target)
    if ctx.facts.kind(target) is Kind.STREAM:  # else it is data, whose rows are where those of the logits are
        probabilities = target.meta["val"].is_floating_point()
        if ctx.layout(target) != (layout if probabilities else rows):
            raise NotSeparable("a loss whose targets do not have the rows of the logits")
    return rows
