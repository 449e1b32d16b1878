"""Attention with sinks in normal form: a softmax over scores and more columns, which are not read.

With L the log-sum-exp of a row of scores s, and K that of its sinks k,

    softmax([s, k])[: len(s)] = softmax(s) * exp(L) / (exp(L) + exp(K)) = softmax(s) * sigmoid(L - K)

so no value has more columns than there are keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ...graph.facts import shape_of
from ...graph.op_arguments import arguments
from ..normalize import cast, insert, is_beginning, rewrite

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default)


@rewrite(aten.slice.Tensor)
def without_sinks(graph: Graph, node: Node) -> Node | None:
    """`softmax(cat([scores, sinks], -1), -1)[..., :-1]` -> a softmax of the scores, times a number a row."""
    call = arguments(node)
    weights = call["self"].args[0] if call["self"].target in CASTS else call["self"]
    last = len(shape_of(node)) - 1
    if weights.target not in SOFTMAXES or not is_beginning(call, last):
        return None
    if arguments(weights)["dim"] % (last + 1) != last:
        return None
    joined = _under_casts(_unshifted(_under_casts(weights.args[0]), last))
    if joined.target is not aten.cat.default or arguments(joined)["dim"] % (last + 1) != last:
        return None
    parts = joined.args[0]
    if len(parts) != 2 or shape_of(parts[0]) != shape_of(node):  # type: ignore[arg-type]
        return None
    scores, sinks = parts  # type: ignore[misc]
    dtype = _widest(scores, weights)
    scores, sinks = cast(graph, node, scores, dtype), cast(graph, node, _unexpanded(sinks), dtype)
    new = partial(insert, graph, node)
    largest = new(aten.maximum.default, *(new(aten.amax.default, x, [last], True) for x in (scores, sinks)))
    largest = new(aten.detach.default, largest)
    scores, sinks = (_lowered(new, x, largest, torch.finfo(dtype).min) for x in (scores, sinks))
    total = new(aten.logsumexp.default, scores, [last], True)
    if shape_of(sinks)[last] != 1:
        sinks = new(aten.logsumexp.default, sinks, [last], True)
    share = new(aten.sigmoid.default, new(aten.sub.Tensor, total, sinks))
    # NaN where nothing is seen at all, and where a sink is infinite, as without the rewrite
    share = new(aten.add.Tensor, share, new(aten.sub.Tensor, largest, largest))
    kept = new(aten.mul.Tensor, new(aten.softmax.int, scores, last), share)
    return cast(graph, node, kept, node.meta["val"].dtype)


def _lowered(new: Callable[..., Node], values: Node, largest: Node, lowest: float) -> Node:
    """Values less the largest of their row.

    NOTE [sinks of rows that see nothing]: scores that are all masked out, or sinks, are minus infinity, whose
    log-sum-exp has no derivative, so they are taken to be the lowest number. Where all of both are masked out
    by the same number, each has the same weight; the logarithm of how many there are is lost beside such a
    number, so the largest is taken away first.

    Args:
        new: makes a node.
        values: (..., columns).
        largest: (..., 1).
    """
    lowered = new(aten.sub.Tensor, values, new(aten.clamp_min.default, largest, lowest))
    return new(aten.clamp_min.default, lowered, lowest)


def _under_casts(node: Any) -> Node:
    """What a value is before it was cast to a dtype in which nothing is rounded."""
    while node.target in CASTS:
        before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        if not before.is_floating_point or torch.promote_types(before, after) != after:
            break
        node = node.args[0]
    return node


def _unshifted(node: Node, last: int) -> Node:
    """The operand of `x - x.max(-1, keepdim=True)`, which has the same softmax; else the value itself."""
    if node.target is not aten.sub.Tensor or node.kwargs or not isinstance(node.args[1], Node):
        return node
    source, largest = node.args
    while largest.target is aten.detach.default:  # type: ignore[union-attr]
        largest = largest.args[0]  # type: ignore[union-attr]
    if largest.target is operator.getitem and largest.args[1] == 0:  # type: ignore[union-attr]
        largest = largest.args[0]  # type: ignore[union-attr]
    if largest.target not in (aten.max.dim, aten.amax.default):  # type: ignore[union-attr]
        return node
    call = arguments(largest)  # type: ignore[arg-type]
    dims = [call["dim"]] if isinstance(call["dim"], int) else list(call["dim"])
    along = [d % (last + 1) for d in dims] == [last] and call["keepdim"]
    return source if along and call["self"] is source else node  # type: ignore[return-value]


def _widest(scores: Node, weights: Node) -> torch.dtype:
    """The dtype of the softmax, and at least float32: what is rounded once there is rounded thrice here."""
    dtypes = (scores.meta["val"].dtype, weights.meta["val"].dtype, torch.float32)
    return torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])


def _unexpanded(sinks: Node) -> Node:
    """Sinks before they are repeated over samples and rows; a broadcast does that by itself."""
    while sinks.target in (aten.expand.default, aten.contiguous.default, aten.clone.default):
        source: Any = sinks.args[0]
        before, after = shape_of(source), shape_of(sinks)
        if len(before) != len(after) or before[-1] != after[-1]:  # as many sinks as there are copies
            break
        sinks = source
    return sinks
