"""Losses in normal form: one value a row or an element first, then the reduction as an op of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .normalize import insert, rewrite
from .rules.pointwise import ELEMENTWISE_LOSSES

aten = torch.ops.aten
MEAN, SUM = 1, 2


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
    plain = call["weight"] is None and not target.meta["val"].is_floating_point()
    if call["reduction"] == 0 or not plain or target.meta["val"].dim() == 0:
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
    target = insert(graph, node, aten.masked_fill.Scalar, zeros, ignored, call["ignore_index"])
    classes = insert(graph, node, aten.neg.default, rows)
    classes = insert(graph, node, aten.unsqueeze.default, classes, 1)
    return insert(
        graph, node, aten.nll_loss_nd.default, classes, target, None, call["reduction"], call["ignore_index"]
    )
