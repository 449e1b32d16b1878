"""linear_loss: one sweep over the loss head, or two.

The head's outputs are small values by rows (losses, log-probabilities); the epilogue makes a scalar of them.
If the epilogue is linear in them, their cotangents do not depend on their values: they are known before the
head runs, and loss and gradient come out of one sweep. If not (a sigmoid of a difference of sums), a first
sweep computes the values, autograd differentiates the epilogue, and a second sweep uses the result.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..graph.facts import Facts, operands, tensors_of

aten = torch.ops.aten

# ops that are linear in their first operand, if no other operand depends on the rows
LINEAR_IN_FIRST = {
    aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.to.dtype,
    aten.to.device, aten.to.dtype_layout, aten.contiguous.default, aten.clone.default, aten.expand.default,
    aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.nll_loss_nd.default, aten.index.Tensor,
    aten.alias.default, aten.flatten.using_ints, aten.detach.default, aten.chunk.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, operator.getitem, aten.unflatten.int,
    aten.movedim.int, aten.movedim.intlist, aten.t.default, aten.mT.default, aten.flip.default,
    aten.roll.default, aten.tril.default, aten.triu.default, aten.cumsum.default,
}  # fmt: skip
# ops that are linear in all operands together
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default}
LINEAR_IN_ALL = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}


def is_linear(facts: Facts, sources: list[Node], target: Node) -> bool:
    """True if `target` is an affine function of `sources` with coefficients that do not depend on them."""
    depends = set(sources)
    for node in facts.nodes:
        if node.op != "call_function" or node in depends:
            continue
        used = [n for n in operands(node) if n in depends]
        if not used:
            continue
        if not _linear_step(node, depends):
            if _reaches(node, target):
                return False
            continue
        depends.add(node)
    return target in depends


def is_homogeneous(nodes: Iterable[Node], sources: Collection[Node], target: Node) -> bool:
    """True if `target` is linear in `sources`, and zero where they are zero.

    Args:
        nodes: of a graph, in order.
        sources, target: among them.
    """
    depends = set(sources)
    for node in nodes:
        if node.op == "call_function" and node not in depends and not depends.isdisjoint(operands(node)):
            if _homogeneous_step(node, depends):
                depends.add(node)
            elif node is target or _reaches(node, target):
                return False
    return target in depends


def _homogeneous_step(node: Node, depends: set[Node]) -> bool:
    first = node.args[0] if node.args else None
    if node.target in LINEAR_IN_ALL:
        return all(
            n in depends for n in pytree.tree_leaves(node.args[0] if isinstance(first, list) else node.args)
        )
    if node.target in PRODUCTS:
        return sum(n in depends for n in node.args) == 1 and len(operands(node)) == 2
    if node.target is aten.masked_fill.Scalar:
        return first in depends and node.args[1] not in depends and node.args[2] == 0
    if node.target is aten.where.self:
        return first not in depends and all(n in depends for n in node.args[1:])
    if node.target is aten.where.ScalarOther:
        return first not in depends and node.args[2] == 0
    return _linear_step(node, depends)


def _linear_step(node: Node, depends: set[Node]) -> bool:
    if not all(v.is_floating_point() or v.is_complex() for v in tensors_of(node)):
        return False  # a cast or a sum to whole numbers is a step function
    if node.target in LINEAR_IN_ALL:
        return True
    others = [a for a in _flat(node.args[1:]) if a in depends] + [
        a for a in _flat(node.kwargs) if a in depends
    ]
    if node.target is aten.mul.Tensor:
        return not (node.args[0] in depends and node.args[1] in depends)
    return node.target in LINEAR_IN_FIRST and not others


def _flat(value: Any) -> list[Any]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Node)]


def _reaches(node: Node, target: Node) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current is target:
            return True
        for user in current.users:
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False
