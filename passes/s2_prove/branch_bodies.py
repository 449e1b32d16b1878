"""What the body of a branch on data may consist of, if it is run where eager would not run it.

Where no row is selected, ops on selected rows are run on none. Each has to take that, and to give no rows:
then all gradients that come out of it are sums of nothing. Other ops of the body must not fail, and must have
no derivative that may be infinite, since it is multiplied by gradients of zero. What is not in these lists is
refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.facts import expression, shape_of, tensors_of
from ..graph.op_arguments import arguments
from ..graph.ops.branch import BRANCH, PREDICATE, PREDICATE_OF_SIZE
from ..graph.purity import is_random
from ..graph.refusals import ASKS, BranchError
from ..rules.pointwise import pointwise_ops
from .emptiness import SELECTED_BY_MASK, Name, Somewhere, is_mask, number_of_indices, symbols_of_values

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
# Ops that do not fail, and have derivatives that do not depend on values.
LINEAR = {
    *VIEWS, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.sum.default,
    aten.sum.dim_IntList, aten.where.self, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.full.default, aten.arange.default, aten.arange.start, aten.new_zeros.default, aten.any.default,
    aten.any.dim, aten.bincount.default, aten.full_like.default, aten.lift_fresh_copy.default,
}  # fmt: skip
# Others whose derivatives do not depend on values. In a body they may fail, or give other rows than none.
MOVED = {
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
    aten.cat.default, aten.stack.default, aten.masked_fill.Scalar, aten.scatter.value, aten.mean.dim,
    aten.topk.default, aten.sort.default, aten.dropout.default,
}  # fmt: skip
# What may stand before bodies and be read by nothing else.
BEFORE_BODIES = {*LINEAR, *MOVED, *OWN}
# Ops of sizes that do not fail.
OF_NUMBERS = {
    operator.add, operator.sub, operator.mul, operator.neg, operator.eq, operator.ne, operator.lt,
    operator.le, operator.gt, operator.ge, operator.getitem, aten.sym_size.int, aten._assert_scalar.default,
    aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default, torch.sym_ite, torch.sym_not,
    torch.sym_max, torch.sym_min, *SELECTED_BY_MASK, aten.chunk.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip
COMPARISONS = {
    aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.gt.Scalar, aten.gt.Tensor,
    aten.ge.Scalar, aten.ge.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor, aten.bitwise_not.default, aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip


def check_body(
    known: Somewhere, name: Name, body: Iterable[Node], way: set[Node], branch: Node, trained: Container[Node]
) -> None:
    """The body of a branch may be run where what is asked does not hold.

    Args:
        known: of the graph.
        name: of what is asked.
        body: its ops.
        way: those that lead from its result back to what was there before.
        branch: it.
        trained: the inputs that have a gradient.

    Raises:
        BranchError: it may not.
    """
    for node in body:
        if node in way and node.target in PUTS and not _puts_nothing(known, name, node):
            raise BranchError(f"{ASKS} to put values that are there without rows", branch)
        if node.op != "call_function" or node in way or node.target in OWN:
            continue
        if not tensors_of(node) and node.target not in OF_NUMBERS:
            raise BranchError(f"{ASKS} to run {node.target}, which may fail without rows", branch)
        if is_random(node):
            raise BranchError(f"{ASKS} to draw random numbers", branch)
        if tensors_of(node) and not _is_harmless(known, name, node, trained):
            raise BranchError(
                f"{ASKS} to run {node.target}, which is not known to be harmless without rows", branch
            )


def check_conditional(known: Somewhere, nodes: Mapping[Node, set[Name]], branch: Node) -> None:
    """What is read by nothing but bodies of branches gets a gradient of zero where eager gives it none.

    Where one of them is run in any case, eager gives it a gradient as well, and zero is added to that.

    Args:
        known: of the graph.
        nodes: such values, outside of bodies, and names of which each alone gives them a gradient in eager.
        branch: one of the branches.

    Raises:
        BranchError: the derivative of one of them may be infinite.
    """
    for node, names in nodes.items():
        finite = node.target in BEFORE_BODIES or _is_multiple(node) or is_certain(known, names)
        if node.op == "call_function" and not finite:
            raise BranchError(f"{ASKS} to use {node.target}, whose derivative may be infinite", branch)


def is_certain(known: Somewhere, names: Iterable[Name]) -> bool:
    """True if one of some things holds in any case, where there are rows.

    An index that an op returns is one of the entries of its operand: one of `index == 0`, `index == 1`, ...
    holds.
    """
    numbers: dict[Node, set[int]] = {}
    for name in names:
        if name[0] == "has":
            numbers.setdefault(name[1], set()).add(name[2])
    return any(
        (count := number_of_indices(values)) is not None and set(range(count)) <= found
        for values, found in numbers.items()
    )


def _is_harmless(known: Somewhere, name: Name, node: Node, trained: Container[Node]) -> bool:
    none = {s: 0 for s in symbols_of_values(node) if _counts_none(known, name, s)}
    values = tensors_of(node)
    if none and all(any(expression(size).subs(none) == 0 for size in v.shape) for v in values):
        return node.target in ON_NO_ROWS or node.target in POINTWISE
    if any(map(symbols_of_values, node.all_input_nodes)):
        return False
    if _is_multiple(node):
        return True
    if node.target in (aten.mul.Tensor, *PRODUCTS):
        parameters = (_viewed(n) in trained for n in node.all_input_nodes)  # which an optimizer keeps finite
        return all(parameters) and not _has_infinite_number(node)
    return node.target in LINEAR or node.target in COMPARISONS


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


def _is_multiple(node: Node) -> bool:
    """True for a product with whole numbers or a mask: the other factor alone has a gradient."""
    return node.target is aten.mul.Tensor and any(map(_is_whole, node.all_input_nodes))


def _is_whole(node: Node) -> bool:
    """True for a mask, also in another dtype, and for whole numbers."""
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex) or is_mask(_viewed(node))


def _viewed(node: Node) -> Node:
    """What a value is a view of."""
    while node.target in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _has_infinite_number(node: Node) -> bool:
    return any(isinstance(a, float) and not math.isfinite(a) for a in node.args)


def _counts_none(known: Somewhere, name: Name, symbol: sympy.Symbol) -> bool:
    """True if a number of selected rows is 0 where what is asked does not hold."""
    mask = known.mask(symbol)
    return mask is not None and name in known.implied(mask)
