"""sparse_gradients: rewrites of `simplify` for gradients that are zero but for a few elements of each row.

A loss reads one element of each row of log-probabilities, so their gradient is one number a row in a matrix
of zeros as wide as the vocabulary. The matrix is not made: the numbers are added where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.facts import shape_of
from .rewriting import FULL_PRECISION, Program, dtype_of, simplification
from .simplify import is_plain

aten = torch.ops.aten
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


@dataclass(frozen=True)
class Sparse:
    """A tensor of zeros with `values` added at the positions `places` along a dim.

    `places` and `values` have one shape: that of the tensor, but along the dim.
    """

    dim: int
    places: Node
    values: Node


@simplification(aten.add.Tensor)
def sum_with_sparse(program: Program, node: Node) -> Node | None:
    """`x + scatter_add(zeros, places, values)` -> `scatter_add(x, places, values)`."""
    if node.kwargs or not is_plain(node):
        return None
    for dense, other in (node.args, node.args[::-1]):
        found = _scattered(program, other)
        if found is not None and program.stays(other, dense):
            given = (dense, found.dim, found.places, found.values)
            return program.insert(node, node, aten.scatter_add.default, *given)
    return None


@simplification(aten._log_softmax_backward_data.default)
def gradient_of_log_softmax(program: Program, node: Node) -> Node | None:
    """`g - exp(y) * sum(g)`, g being zeros with a few values v -> `scatter_add(exp(y) * -sum(v), places, v)`.

    NOTE [one wide tensor]: the log-probabilities are written over by their gradient (`write_in_place`), so
    that of all that is as wide as the vocabulary one tensor is alive, and not two.
    """
    gradient, logs, dim, _ = node.args
    if node.kwargs or dtype_of(node) not in FULL_PRECISION or not isinstance(gradient, Node):
        return None
    if dtype_of(gradient) != dtype_of(node) or dtype_of(logs) != dtype_of(node):
        return None
    if not program.stays(gradient, logs):
        return None
    dim %= len(shape_of(node))
    found = _scattered(program, gradient) or _of_chosen(program, gradient)
    if found is None or found.dim != dim:
        return None
    total = found.values
    if shape_of(total)[dim] != 1:
        total = program.insert(node, node, aten.sum.dim_IntList, total, [dim], True)
    scale = program.insert(node, node, aten.neg.default, total)
    probabilities = program.insert(node, node, aten.exp.default, logs)
    spread = program.insert(node, node, aten.mul.Tensor, probabilities, scale)
    return program.insert(node, node, aten.scatter_add.default, spread, dim, found.places, found.values)


def _scattered(program: Program, node: Node) -> Sparse | None:
    """What is added to zeros, if nobody else reads the sum: the gradient of `gather`."""
    if node.target is not aten.scatter_add.default or len(node.users) != 1:
        return None
    zeros, dim, places, values = node.args
    if zeros.target not in ZEROS or len(zeros.users) != 1 or shape_of(places) != shape_of(values):
        return None
    dim %= len(shape_of(node))
    sizes = zip(shape_of(node), shape_of(places), strict=True)
    whole = all(a == b for k, (a, b) in enumerate(sizes) if k != dim)
    return Sparse(dim, places, values) if whole and program.stays(node, places, values) else None


def _of_chosen(program: Program, node: Node) -> Sparse | None:
    """The gradient of a loss that reads the log-probability of one class a row, without weights of classes.

    A row that is ignored gets zero at the class zero.
    """
    if node.target is not aten.nll_loss_backward.default or len(node.users) != 1 or node.kwargs:
        return None
    cotangent, _, classes, weight, reduction, ignored, _ = node.args
    rows = shape_of(classes)
    if weight is not None or reduction != 0 or len(rows) != 1 or shape_of(cotangent) != rows:
        return None
    if not program.stays(node, cotangent, classes):
        return None
    skipped = program.insert(node, node, aten.eq.Scalar, classes, ignored)
    places = program.insert(node, node, aten.masked_fill.Scalar, classes, skipped, 0)
    negative = program.insert(node, node, aten.neg.default, cotangent)
    values = program.insert(node, node, aten.masked_fill.Scalar, negative, skipped, 0)
    places, values = (program.insert(node, node, aten.unsqueeze.default, n, 1) for n in (places, values))
    return Sparse(1, places, values)
