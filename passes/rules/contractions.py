"""Products of tensors: linear layers, matmul and attention. Here columns come into being."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import (
    COLUMN_AXIS,
    ROW_AXIS,
    Axis,
    Kind,
    Layout,
    Mask,
    Mixing,
    NotSeparable,
    Reach,
    Role,
    shape_of,
)
from ..graph.op_arguments import arguments, sdpa_arguments
from ..graph.ops.causal_convolution import CAUSAL_CONV1D, rows_before
from .registry import RuleContext, forbid, merge_aligned, rule

aten = torch.ops.aten


@rule(aten.linear.default)
def linear(ctx: RuleContext, node: Node) -> Layout:
    """The last dim is contracted with a weight: rows stay rows."""
    call = arguments(node)
    layout, weight = ctx.layout(call["input"]), call["weight"]
    forbid(layout, [len(layout) - 1], "a linear layer contracts")
    for operand in (weight, call["bias"]):
        if isinstance(operand, Node) and ctx.facts.carries(operand):
            raise NotSeparable("the weight of a linear layer carries the sequence")
    return (*layout[:-1], *((None,) if len(shape_of(weight)) == 2 else ()))


@rule(aten.addmm.default)
def addmm(ctx: RuleContext, node: Node) -> Layout:
    """Rows times a matrix plus a bias, or plus rows: rows stay rows."""
    call = arguments(node)
    bias, x, weight = (call[name] for name in ("self", "mat1", "mat2"))
    if ctx.facts.carries(weight):
        raise NotSeparable("the weight of a linear layer carries the sequence")
    layout = ctx.layout(x)
    forbid(layout, [1], "a matrix product contracts")
    result = (layout[0], None)
    if ctx.facts.carries(bias) and ctx.layout(bias) != result:
        raise NotSeparable("what is added to a product has its rows in another place")
    return result


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(ctx: RuleContext, node: Node) -> Layout:
    """Rows times a matrix, scores of rows against columns, or scores times the rows of the columns."""
    return product(ctx, node, node.args[0], node.args[1])


@rule(aten.baddbmm.default)
def baddbmm(ctx: RuleContext, node: Node) -> Layout:
    """A batched product as `matmul`, plus an addend that has no gradient."""
    bias, left, right = node.args[:3]
    result = product(ctx, node, left, right)
    if ctx.facts.kind(bias) is Kind.STREAM:
        raise NotSeparable("the addend of a batched product is streamed")
    if not node.meta["val"].is_floating_point():
        raise NotSeparable("a batched product of integers")  # its factors may round
    if node.kwargs.get("alpha", 1) == 0:
        raise NotSeparable("a batched product times zero")  # PyTorch does not look at what is infinite in it
    ctx.seen.add(bias)  # data: its rows are where those of the result are
    return result


def product(ctx: RuleContext, node: Node, left: Any, right: Any) -> Layout:
    """Layout of `left @ right`.

    * no contracted dim carries the sequence, both outer dims do: rows of `left` against the rows of
      `right`, which are read as columns (attention scores); rows of `left` may also be one of the dims
      before, over which `right` is broadcast;
    * the contracted dim is a column of `left`: it meets the rows of `right`, read as columns (attention
      output);
    * a contraction of rows with rows is a sum over the sequence, and refused.

    Raises:
        NotSeparable: the product sums over the sequence, or it is not known to keep rows apart.
    """
    a, b = ctx.layout(left), ctx.layout(right)
    if len(a) < 2 or len(b) < 2:
        raise NotSeparable("a product with a vector")
    batch = _batch(ctx, node, left, right, a, b)
    m, contracted_a, contracted_b, n = a[-2], a[-1], b[-2], b[-1]
    if (contracted_a, contracted_b, n) == (None, None, None):
        return (*batch, m, n)
    for axis in (m, contracted_a, contracted_b, n):
        if axis is not None and not axis.simple:
            raise NotSeparable("a product over a dim that merges the sequence with another")
    if contracted_a is None and contracted_b is None:
        if n is not None and (m is not None or _rows_before(ctx, left, right)):
            if m not in (None, ROW_AXIS) or n.role is not Role.ROW:
                raise NotSeparable("a product of columns")
            ctx.mixes(Mixing(node, columns=(right,)))
            n = COLUMN_AXIS
        return (*batch, m, n)
    if contracted_a == COLUMN_AXIS and contracted_b == Axis() and m == Axis() and n is None:
        ctx.mixes(Mixing(node, columns=(right,)))
        return (*batch, m, n)
    raise NotSeparable("a product that sums over the sequence axis")


def _rows_before(ctx: RuleContext, left: Node, right: Node) -> bool:
    """True if `left` has its rows in a dim before the last two, and `right` is the same for each of them."""
    before, repeated = ctx.layout(left)[:-2], [1] * ctx.rank(left) + list(shape_of(right)[:-2])
    rows = [d - len(before) for d, axis in enumerate(before) if axis is not None]
    alone = [before[d] for d in rows] == [ROW_AXIS] and not any(ctx.layout(right)[:-2])
    return alone and repeated[rows[0]] == 1


def _batch(ctx: RuleContext, node: Node, left: Node, right: Node, a: Layout, b: Layout) -> list[Axis | None]:
    result: list[Axis | None] = [None] * (ctx.rank(node) - 2)
    for operand, layout in ((left, a), (right, b)):
        merge_aligned(result, layout[:-2], shape_of(operand)[:-2])
    return result


@rule(CAUSAL_CONV1D)
def causal_convolution(ctx: RuleContext, node: Node) -> Layout:
    """Row i reads as many rows, its own the last, as the convolution is wide."""
    call = arguments(node)
    layout, weight = ctx.layout(call["input"]), call["weight"]
    for operand in (weight, call["bias"]):
        if isinstance(operand, Node) and ctx.facts.carries(operand):
            raise NotSeparable("the weight of a convolution carries the sequence")
    if layout[2] is None:  # rows are samples, or nothing is along the convolution
        if weight is not None:
            forbid(layout, [1], "a convolution over channels that hold")
        return layout
    if layout != (None, None, Axis()) or ctx.facts.kind(call["input"]) is not Kind.STREAM:
        raise NotSeparable("a convolution along a dim that holds more than the sequence")
    width = rows_before(node) + 1
    ctx.mixes(Mixing(node, columns=(call["input"],), reach=Reach.WINDOW, window=int(width)))
    return layout


def _attention_to_context(ctx: RuleContext, call: dict[str, Any], query: Layout) -> Layout:
    """Each row of the queries reads keys and values that are no rows, under its own row of the mask."""
    mask = call["attn_mask"]
    if call["is_causal"] or call["dropout_p"] != 0.0:
        raise NotSeparable("an attention to a context depends on the numbers of rows, or draws numbers")
    if any(ctx.rank(call[name]) != ctx.rank(call["query"]) for name in ("key", "value")):
        raise NotSeparable("an attention to a context that has other dims than the queries")
    if call["enable_gqa"] and any(query[:-2][-1:]):
        raise NotSeparable("the heads of an attention, which are grouped, are rows")
    forbid(query, [len(query) - 1], "the scores of an attention sum over")
    if isinstance(mask, Node):
        merged: list[Axis | None] = list(query)
        merge_aligned(merged, ctx.layout(mask), shape_of(mask))
        if tuple(merged) != query:
            raise NotSeparable("the mask of an attention to a context has rows where the queries have none")
    return query


@rule(aten.scaled_dot_product_attention.default)
def attention(ctx: RuleContext, node: Node) -> Layout:
    """Row i of the queries reads columns of keys and values, as far as the mask allows."""
    call = sdpa_arguments(node)
    query, key, value, mask = (call[k] for k in ("query", "key", "value", "attn_mask"))
    layouts = [ctx.layout(n) for n in (query, key, value)]
    if not any(ctx.facts.carries(n) for n in (key, value)):
        return _attention_to_context(ctx, call, layouts[0])
    _check_heads(query, key, value, call["enable_gqa"])
    expected = (*(None,) * (ctx.rank(node) - 2), Axis(), None)
    for name, layout in zip(("query", "key", "value"), layouts, strict=True):
        if layout != expected:
            raise NotSeparable(f"the {name} of an attention has its sequence axis in an unusual place")
    reach = Reach.CAUSAL if call["is_causal"] else Reach.FULL
    streamed = isinstance(mask, Node) and ctx.facts.kind(mask) is Kind.STREAM
    if streamed:
        _check_streamed_mask(ctx, mask)
    limit = Mask.of(mask) if isinstance(mask, Node) and not streamed else None
    ctx.mixes(Mixing(node, columns=(key, value), mask=limit, reach=reach))
    ctx.seen.add(mask)  # read by rows and columns, see `footprints`
    return expected


def _check_heads(query: Any, key: Any, value: Any, grouped: bool) -> None:
    """Keys and values have the same samples and heads, and queries those too, or several for each head.

    The kernels for chunks read as many samples of each as the queries have. One head of keys and values for
    all is a group; more are groups where the model says so.

    Raises:
        NotSeparable: not so.
    """
    queries, keys, values = (shape_of(n)[:-2] for n in (query, key, value))
    several = len(queries) == 2 and queries[0] == keys[0] and (grouped or keys[1] == 1)
    several = several and queries[1] % keys[1] == 0
    if keys != values or not (queries == keys or several):
        raise NotSeparable("an attention whose queries, keys or values are broadcast over samples or heads")


def _check_streamed_mask(ctx: RuleContext, mask: Node) -> None:
    """A mask that depends on parameters is one of rows and columns, and no gradient goes through it.

    Raises:
        NotSeparable: it is not.
    """
    if mask in ctx.facts.needs_grad:
        raise NotSeparable("the mask of an attention depends on parameters, and has a gradient")
    layout = ctx.layout(mask)
    if layout[-2:] != (ROW_AXIS, COLUMN_AXIS) or any(layout[:-2]):
        raise NotSeparable("the mask of an attention has its rows or its columns in an unusual place")
