"""Products in normal form: an einsum of two operands is a matrix product of their dims in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.facts import shape_of
from .normalize import cast, insert, rewrite

aten = torch.ops.aten


@rewrite(aten.einsum.default)
def einsum_as_product(graph: Graph, node: Node) -> Node | None:
    """`einsum("bhid,bhjd->bhij", q, k)` -> `q @ k.transpose(-1, -2)`, and so for any two operands."""
    equation, operands, *path = node.args
    labels = _labels(equation, operands)  # type: ignore[arg-type]
    if labels is None or any(p is not None for p in path) or node.kwargs.get("path") is not None:
        return None
    left, right, result = labels
    shared = [c for c in left if c in right]
    batch = [c for c in result if c in shared]
    inner = [c for c in shared if c not in result]
    rows, columns = ([c for c in own if c not in shared] for own in (left, right))
    if any(c not in result for c in (*rows, *columns)) or any(c not in (*left, *right) for c in result):
        return None  # a sum over one operand, or a dim that nobody has
    if not _sizes_agree(left, right, operands):
        return None  # a dim of size 1 is broadcast
    # in the dtype of the result, which may be that of autocast
    operands = [cast(graph, node, x, node.meta["val"].dtype) for x in operands]  # type: ignore[union-attr]
    first = _matrix(graph, node, operands[0], left, (batch, rows, inner))  # type: ignore[index]
    second = _matrix(graph, node, operands[1], right, (batch, inner, columns))  # type: ignore[index]
    product = insert(graph, node, aten.matmul.default, first, second)
    product = _ungrouped(graph, node, product, len(batch) + 1, columns, right, operands[1])  # type: ignore[index]
    product = _ungrouped(graph, node, product, len(batch), rows, left, operands[0])  # type: ignore[index]
    order = [*batch, *rows, *columns]
    if order == result:
        return product
    return insert(graph, node, aten.permute.default, product, [order.index(c) for c in result])


def _labels(equation: str, operands: Any) -> tuple[list[str], list[str], list[str]] | None:
    """Labels of the dims of two operands and of the result; None for anything else."""
    sides = equation.replace(" ", "").split("->")
    given = sides[0].split(",")
    if len(given) != 2 or len(operands) != 2 or "." in equation:
        return None
    both = given[0] + given[1]
    made = sides[1] if len(sides) == 2 else "".join(sorted(c for c in set(both) if both.count(c) == 1))
    found = [list(given[0]), list(given[1]), list(made)]
    return None if any(len(set(own)) < len(own) for own in found) else tuple(found)  # type: ignore[return-value]


def _sizes_agree(left: list[str], right: list[str], operands: Any) -> bool:
    first, second = (
        dict(zip(own, shape_of(x), strict=True)) for own, x in zip((left, right), operands, strict=True)
    )
    return all(first[c] == second[c] for c in first if c in second)


def _matrix(graph: Graph, before: Node, value: Node, labels: list[str], groups: Any) -> Node:
    """An operand as matrices: batch dims, then one dim for each of the other two groups of labels."""
    order = [c for group in groups for c in group]
    if order != labels:
        value = insert(graph, before, aten.permute.default, value, [labels.index(c) for c in order])
    dim = len(groups[0])
    for group in groups[1:]:
        if len(group) == 0:
            value = insert(graph, before, aten.unsqueeze.default, value, dim)
        elif len(group) > 1:
            value = insert(graph, before, aten.flatten.using_ints, value, dim, dim + len(group) - 1)
        dim += 1
    return value


def _ungrouped(
    graph: Graph, before: Node, product: Node, dim: int, group: list[str], labels: list[str], source: Node
) -> Node:
    """A product whose dim that stands for a group of labels is taken apart again."""
    if len(group) == 1:
        return product
    if not group:
        return insert(graph, before, aten.squeeze.dim, product, dim)
    sizes = []
    for place in (labels.index(c) for c in group):
        size = source.meta["val"].shape[place]
        sizes.append(
            size if isinstance(size, int) else insert(graph, before, aten.sym_size.int, source, place)
        )
    return insert(graph, before, aten.unflatten.int, product, dim, sizes)
