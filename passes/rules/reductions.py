"""Reductions and normalisations over dims that do not carry the sequence."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..ir import Layout, NotSeparable, Role
from . import RuleContext, forbid, normalize_dim, rule

aten = torch.ops.aten


def reduced_dims(node: Node, rank: int) -> list[int]:
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or given == []:
        return list(range(rank))
    return [normalize_dim(d, rank) for d in ([given] if isinstance(given, int) else given)]


@rule(
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.dim,
    aten.var.correction, aten.std.dim, aten.logsumexp.default, aten.prod.dim_int, aten.any.dim,
    aten.all.dim, aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim, aten.max.dim, aten.min.dim,
)  # fmt: skip
def reduce(ctx: RuleContext, node: Node) -> Layout:
    """Over dims without the sequence, rows stay rows; a reduction over the sequence is refused."""
    layout = ctx.layout(node.args[0])
    if node.target in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim):
        given = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        dims = list(range(len(layout))) if given is None else [normalize_dim(d, len(layout)) for d in given]
        keep = node.args[3] if len(node.args) > 3 else node.kwargs.get("keepdim", False)
    else:
        dims = reduced_dims(node, len(layout))
        keep = node.args[2] if len(node.args) > 2 and isinstance(node.args[2], bool) else False
        keep = node.kwargs.get("keepdim", keep)
    if node.target is aten.var.dim:
        keep = node.args[3] if len(node.args) > 3 else node.kwargs.get("keepdim", False)
    forbid(layout, dims, "a reduction over")
    return tuple(None if d in dims else a for d, a in enumerate(layout) if keep or d not in dims)


@rule(aten.sum.default, aten.mean.default)
def reduce_all(ctx: RuleContext, node: Node) -> Layout:
    """A sum or mean over everything, of a value that has no rows."""
    forbid(ctx.layout(node.args[0]), list(range(len(ctx.layout(node.args[0])))), "a reduction over")
    return ()


@rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def softmax(ctx: RuleContext, node: Node) -> Layout:
    """Along a column axis the rows stay apart: each row is normalised over what it reads."""
    layout = ctx.layout(node.args[0])
    forbid(layout, [normalize_dim(node.args[1], len(layout))], "a softmax over", Role.ROW)
    return layout


@rule(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(ctx: RuleContext, node: Node) -> Layout:
    """Over the last dims, each row by itself."""
    layout = ctx.layout(node.args[0])
    rank = len(node.args[1])
    forbid(layout, list(range(len(layout) - rank, len(layout))), "a normalisation over")
    return layout


@rule(aten.cumsum.default, aten.cumprod.default, aten.sort.default, aten.argsort.default)
def scan(ctx: RuleContext, node: Node) -> Layout:
    """A running sum, product or sort along a dim without the sequence: rows stay rows."""
    layout = ctx.layout(node.args[0])
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
    forbid(layout, [normalize_dim(dim, len(layout))], "a scan along")
    return layout


@rule(aten.topk.default)
def topk(ctx: RuleContext, node: Node) -> Layout:
    """A selection along a dim without the sequence: each row selects by itself."""
    layout = ctx.layout(node.args[0])
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    forbid(layout, [normalize_dim(dim, len(layout))], "a selection along")
    return layout


@rule(operator.getitem)
def getitem(ctx: RuleContext, node: Node) -> Layout:
    """One of several results; they all have the layout of the op."""
    return ctx.layout(node.args[0])


@rule(aten.cross_entropy_loss.default)
def cross_entropy(ctx: RuleContext, node: Node) -> Layout:
    """Without a reduction (the normalize pass sees to that) one loss a row."""
    x = node.args[0]
    reduction = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", 1)
    if reduction != 0:
        raise NotSeparable("a loss summed over the sequence axis")
    layout = ctx.layout(x)
    classes = 0 if len(layout) == 1 else 1
    forbid(layout, [classes], "a loss over")
    return tuple(a for d, a in enumerate(layout) if d != classes)
