"""write_in_place: ops that may write over an operand that nobody reads afterwards do so.

A chunk's body is a long row of elementwise ops. Each that makes a new tensor of the size of one that has just
become free holds two where one would do, and asks the allocator for memory that must be touched first.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..cost.storages import Storages
from ..graph.facts import expression, tensors_of

aten = torch.ops.aten
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
# In-place overloads whose names cannot be derived, and those of sums with a product or with a few elements.
NAMED = {
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.addmm.default: aten.addmm_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
# Kernels that may write over their first operand, each with its form for that and the place of its dim.
WITH_OUT = {
    aten._log_softmax.default: (aten._log_softmax.out, 1),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, 2),
}


def write_in_place(graph: Graph) -> Storages:
    """Turn ops into their in-place forms, where the result takes the place of an operand's last use.

    NOTE [what may be written over]: a tensor that an op of this graph made, that fills its storage, and of
    whose storage no value (no view, that is) is read later or returned. Storages are those of the fake
    tensors that the program was traced with, so a view counts as one whatever op made it.

    Returns:
        Where the values lie now.
    """
    storages = Storages(graph)
    _log_softmaxes(graph, storages)
    for node in list(graph.nodes):
        target = in_place_form(node)
        if target is None:
            continue
        for args in _orders(node):
            if isinstance(args[0], Node) and storages.ends(args[0], node) and _fits(args[0], node):
                storages.take(args[0], node)
                node.target, node.args = target, args
                break
    return storages


def in_place_form(node: Node) -> torch._ops.OpOverload | None:
    """The in-place form of an elementwise op, or of a sum with a product, if it has one."""
    op = node.target
    if op in NAMED:
        return NAMED[op]
    if (
        not isinstance(op, torch._ops.OpOverload)
        or torch.Tag.pointwise not in op.tags
        or op._schema.is_mutable
    ):
        return None
    packet = getattr(aten, op._schema.name.split("::")[1] + "_", None)
    return getattr(packet, op._overloadname, None) if op.namespace == "aten" and packet is not None else None


def _orders(node: Node) -> list[tuple]:
    """The arguments, with each operand in front that may stand there."""
    swapped = node.target in COMMUTATIVE and not node.kwargs and len(node.args) == 2
    return [node.args, (node.args[1], node.args[0])] if swapped else [node.args]


def _fits(value: Node, result: Node) -> bool:
    """True if the result has exactly the form of the value, and the value fills its storage."""
    old, new = tensors_of(value), tensors_of(result)
    if len(old) != 1 or len(new) != 1 or old[0].dtype != new[0].dtype or old[0].device != new[0].device:
        return False
    size = expression(old[0].untyped_storage().nbytes())
    filled = sympy.expand(size - expression(old[0].numel()) * old[0].element_size()) == 0
    return filled and _form(old[0]) == _form(new[0])


def _form(value: Tensor) -> tuple:
    return tuple(expression(s) for s in (*value.shape, *value.stride()))


def _log_softmaxes(graph: Graph, storages: Storages) -> None:
    """Write a log-softmax over its operand, and its gradient over the gradient that comes in.

    It is the same kernel with another place for its result, so the bits are the same. The kernels read all of
    a row that they need before they write to it; that is known of the CPU's, and so it is done there alone.
    """
    for node in list(graph.nodes):
        if node.target not in WITH_OUT or node.kwargs or not on_cpu(node):
            continue
        operand, dim = node.args[0], node.args[WITH_OUT[node.target][1]]
        last = dim in (-1, len(tensors_of(node)[0].shape) - 1)
        if last and storages.ends(operand, node) and _fits(operand, node):
            storages.take(operand, node)
            node.target, node.kwargs = WITH_OUT[node.target][0], {"out": operand}


def on_cpu(node: Node) -> bool:
    """True if what an op makes lies on the CPU."""
    return all(v.device.type == "cpu" for v in tensors_of(node))
