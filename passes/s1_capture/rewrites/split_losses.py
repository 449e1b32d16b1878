"""Losses in normal form: one value a row or an element first, then the reduction as an op of its own.

And what losses by hand are made of: the choice of one class a row, operands that are broadcast.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ...graph.facts import shape_of
from ...rules.pointwise import ELEMENTWISE_LOSSES
from ..normalize import insert, rewrite

aten = torch.ops.aten
MEAN, SUM = 1, 2
# Stands for the classes that a loss ignores where the only other class is 0.
IGNORED = -100


@rewrite(*ELEMENTWISE_LOSSES)
def loss_by_elements(graph: Graph, node: Node) -> Node | None:
    """`loss(x, y, reduction)` -> the loss of each element, then mean or sum."""
    position = ELEMENTWISE_LOSSES[node.target]
    args = list(node.args)
    reduction = args[position] if len(args) > position else node.kwargs.get("reduction", MEAN)
    if reduction not in (MEAN, SUM):
        return None
    kwargs = {**node.kwargs, "reduction": 0}
    if len(args) > position:
        args[position] = kwargs.pop("reduction")
    elements = insert(graph, node, node.target, *args, **kwargs)
    return insert(graph, node, (aten.mean if reduction == MEAN else aten.sum).default, elements)


@rewrite(aten.cross_entropy_loss.default)
def loss_by_rows(graph: Graph, node: Node) -> Node | None:
    """`cross_entropy(x, t)` -> one loss a row, then the reduction.

    NOTE [the same summation as eager]: the rows are summed by `nll_loss` on one class, the very kernel
    and order that eager uses, so that the loss is bitwise the same even where the model computes it in
    a lower precision than its weights.
    """
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    call: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    call.update(zip(names, node.args, strict=False))
    call.update(node.kwargs)
    target = call["target"]
    by_classes = call["weight"] is None and not target.meta["val"].is_floating_point()
    if call["reduction"] == 0 or not by_classes or target.meta["val"].dim() == 0:
        return None
    rows = insert(
        graph, node, node.target, call["input"], target, None, 0, call["ignore_index"],
        call["label_smoothing"],
    )  # fmt: skip
    if target.meta["val"].dim() > 1:
        rows = insert(graph, node, aten.reshape.default, rows, [-1])
        target = insert(graph, node, aten.reshape.default, target, [-1])
    ignored = insert(graph, node, aten.eq.Scalar, target, call["ignore_index"])
    zeros = insert(graph, node, aten.zeros_like.default, target)
    target = insert(graph, node, aten.masked_fill.Scalar, zeros, ignored, IGNORED)
    classes = insert(graph, node, aten.neg.default, rows)
    classes = insert(graph, node, aten.unsqueeze.default, classes, 1)
    return insert(graph, node, aten.nll_loss_nd.default, classes, target, None, call["reduction"], IGNORED)


@rewrite(aten.broadcast_tensors.default)
def broadcast_one_by_one(graph: Graph, node: Node) -> None:
    """Tensors that are broadcast together, each as the `expand` that it is."""
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        source = node.args[0][user.args[1]]
        if shape_of(source) != shape_of(user):
            others = [n for n in node.args[0] if shape_of(n) == shape_of(user)]
            if not others:
                continue
            source = insert(graph, user, aten.expand_as.default, source, others[0])
        user.replace_all_uses_with(source)
        graph.erase_node(user)


@rewrite(aten.index.Tensor)
def chosen_by_index(graph: Graph, node: Node) -> Node | None:
    """`x[arange(n), t]` -> one entry of each row: `gather`. Negative indices count from the end."""
    source, indices = node.args
    sizes = shape_of(source)
    if len(indices) != len(sizes) or len(sizes) < 2 or not all(isinstance(i, Node) for i in indices):
        return None
    *rows, chosen = indices
    whole_numbers = chosen.meta["val"].dtype in (torch.int32, torch.int64)
    if (
        not whole_numbers
        or not sizes[-1].is_Integer
        or shape_of(node) != sizes[:-1]
        or shape_of(chosen) != sizes[:-1]
    ):
        return None
    if not all(_counts(n, sizes[k], len(rows) - k) for k, n in enumerate(rows)):
        return None
    behind = insert(graph, node, aten.add.Scalar, chosen, int(sizes[-1]))
    negative = insert(graph, node, aten.lt.Scalar, chosen, 0)
    places = insert(graph, node, aten.where.self, negative, behind, chosen)
    places = insert(graph, node, aten.to.dtype, places, torch.int64)
    places = insert(graph, node, aten.unsqueeze.default, places, -1)
    found = insert(graph, node, aten.gather.default, source, len(sizes) - 1, places)
    return insert(graph, node, aten.squeeze.dim, found, -1)


def _counts(node: Node, size: sympy.Expr, from_right: int) -> bool:
    """True if a value is 0, 1, 2, ... along the dim that is this far from the right, and has no other."""
    shape = shape_of(node)
    if len(shape) < from_right or any(
        s != (size if d == len(shape) - from_right else 1) for d, s in enumerate(shape)
    ):
        return False
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        node = node.args[0]
    start = node.args[0] if node.target is aten.arange.start else 0
    return node.target in (aten.arange.default, aten.arange.start) and start == 0
