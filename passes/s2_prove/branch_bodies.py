"""What the body of a branch on data may consist of, if it is run where eager would not run it.

Where no row is selected, ops on selected rows are run on none. Each has to take that, and to give no rows:
then all gradients that come out of it are sums of nothing. Other ops of the body must not fail, and their
derivatives must be finite, since they are multiplied by gradients of zero. What is not in these lists is
refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.facts import expression, shape_of, tensors_of
from ..graph.functionalization import ASKS, BranchError
from ..graph.op_arguments import arguments
from ..graph.ops.branch import BRANCH, PREDICATE, PREDICATE_OF_SIZE
from ..graph.purity import is_random
from ..rules.pointwise import pointwise_ops
from .emptiness import SELECTED_BY_MASK, Name, Somewhere, is_mask, symbols_of_values

aten = torch.ops.aten
OWN = {BRANCH.default, PREDICATE.default, PREDICATE_OF_SIZE.default}
VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.chunk.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, operator.getitem,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten._to_copy.default,
}  # fmt: skip
PRODUCTS = {aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default}
# Ops that take no rows, and give none.
ON_NO_ROWS = {
    *VIEWS, *PRODUCTS, *SELECTED_BY_MASK, aten.layer_norm.default, aten.rms_norm.default, aten.softmax.int,
    aten.log_softmax.int, aten.cat.default, aten.stack.default, aten.index.Tensor, aten.index_select.default,
    aten.gather.default, aten.sum.dim_IntList, aten.mean.dim, aten.zeros_like.default, aten.ones_like.default,
    aten.new_zeros.default, aten.index_add.default, aten.index_put.default, aten.scatter_add.default,
}  # fmt: skip
# Ops that do not fail, and have finite derivatives at finite values.
FINITE = {
    *VIEWS, *PRODUCTS, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.sum.default,
    aten.sum.dim_IntList, aten.where.self, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.full.default, aten.arange.default, aten.arange.start, aten.new_zeros.default, aten.any.default,
    aten.any.dim, aten.bincount.default, aten.full_like.default, aten.lift_fresh_copy.default,
}  # fmt: skip
# Ops with finite derivatives at finite values which would give other rows than none, or may fail, in a body.
SMOOTH = {
    aten.softmax.int, aten.log_softmax.int, aten.sigmoid.default, aten.tanh.default, aten.silu.default,
    aten.gelu.default, aten.relu.default, aten.layer_norm.default, aten.topk.default, aten.sort.default,
    aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.mean.dim, aten.cat.default,
    aten.stack.default, aten.masked_fill.Scalar, aten.div.Scalar, aten.mul.Scalar, aten.add.Scalar,
    aten.embedding.default, aten.dropout.default, aten.scatter.value, aten.exp.default,
}  # fmt: skip
COMPARISONS = {
    aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.gt.Scalar, aten.gt.Tensor,
    aten.ge.Scalar, aten.ge.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor, aten.bitwise_not.default, aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip


def check_body(known: Somewhere, name: Name, body: Iterable[Node], way: set[Node], branch: Node) -> None:
    """The body of a branch may be run where what is asked does not hold.

    Args:
        known: of the graph.
        name: of what is asked.
        body: its ops.
        way: those that lead from its result back to what was there before.
        branch: it.

    Raises:
        BranchError: it may not.
    """
    for node in body:
        if node in way and node.target in PUTS and not _puts_nothing(known, name, node):
            raise BranchError(f"{ASKS} to put values that are there without rows", branch)
        if node.op != "call_function" or node in way or node.target in OWN:
            continue
        if is_random(node):
            raise BranchError(f"{ASKS} to draw random numbers", branch)
        if tensors_of(node) and not _is_harmless(known, name, node):
            raise BranchError(
                f"{ASKS} to run {node.target}, which is not known to be harmless without rows", branch
            )


def check_conditional(nodes: Iterable[Node], branch: Node) -> None:
    """What is read by nothing but bodies of branches gets a gradient of zero where eager gives it none.

    Args:
        nodes: such values, outside of bodies.
        branch: one of the branches.

    Raises:
        BranchError: the derivative of one of them may be infinite.
    """
    for node in nodes:
        smooth = node.target in FINITE or node.target in SMOOTH or _is_share(node) or _is_of_a_norm(node)
        if node.op == "call_function" and not smooth:
            raise BranchError(f"{ASKS} to use {node.target}, whose derivative may be infinite", branch)


def _is_of_a_norm(node: Node) -> bool:
    """True for a square, and for the root of a mean of squares and something above zero."""
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[1] == 2
    total = node.args[0] if node.target in (aten.rsqrt.default, aten.sqrt.default) else None
    if not isinstance(total, Node) or total.target not in (aten.add.Tensor, aten.add.Scalar):
        return False
    mean, more = total.args[:2]
    above = isinstance(more, (int, float)) and more > 0
    return above and isinstance(mean, Node) and mean.target is aten.mean.dim and _is_square(mean.args[0])


def _is_square(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    return power or (node.target is aten.mul.Tensor and node.args[0] is node.args[1])


def _is_share(node: Node) -> bool:
    """True for values divided by their sum, which are NaN themselves where that is zero."""
    if node.target is not aten.div.Tensor:
        return False
    values, total = node.args
    while isinstance(total, Node) and total.target in (*VIEWS, aten.add.Tensor) and total is not values:
        total = total.args[0]  # type: ignore[assignment]
    return isinstance(total, Node) and total.target is aten.sum.dim_IntList and total.args[0] is values


def _is_harmless(known: Somewhere, name: Name, node: Node) -> bool:
    none = {s: 0 for s in symbols_of_values(node) if _counts_none(known, name, s)}
    values = tensors_of(node)
    if none and all(any(expression(size).subs(none) == 0 for size in v.shape) for v in values):
        return node.target in ON_NO_ROWS or node.target in POINTWISE
    if any(map(symbols_of_values, node.all_input_nodes)):
        return False
    if node.target in (aten.mul.Tensor, *PRODUCTS) and any(map(_may_be_infinite, node.all_input_nodes)):
        return False
    return node.target in FINITE or node.target in COMPARISONS


def _puts_nothing(known: Somewhere, name: Name, node: Node) -> bool:
    """True for an op that can put no rows: its values have none, or are the same for each row."""
    call = arguments(node)
    put = node.target is aten.index_put.default
    value = call["values"] if put else call["source" if "source" in call else "src"]
    none = {s: 0 for s in symbols_of_values(value) if _counts_none(known, name, s)}
    if any(size.subs(none) == 0 for size in shape_of(value)):
        return True
    if not put:
        return False
    given: list[Any] = [i for i in call["indices"] if i is not None]
    dims = sum(i.meta["val"].dim() if is_mask(i) else 1 for i in given)
    picked = max(1 if is_mask(i) else i.meta["val"].dim() for i in given)
    return len(shape_of(value)) < node.meta["val"].dim() - dims + picked


POINTWISE = frozenset(pointwise_ops())
PUTS = {
    aten.index_put.default, aten.index_add.default, aten.index_copy.default, aten.scatter_add.default,
    aten.scatter.src,
}  # fmt: skip


def _may_be_infinite(node: Node) -> bool:
    """True for a table that is no parameter, such as a mask of minus infinity, and for a view of one."""
    while node.target in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    value = node.meta.get("val")
    given = node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor)
    return given and value.is_floating_point() and not value.requires_grad  # type: ignore[union-attr]


def _counts_none(known: Somewhere, name: Name, symbol: sympy.Symbol) -> bool:
    """True if a number of selected rows is 0 where what is asked does not hold."""
    mask = known.mask(symbol)
    return mask is not None and name in known.implied(mask)
