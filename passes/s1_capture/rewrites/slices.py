"""Slices are taken before values become wide."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from ...graph.facts import shape_of
from ..normalize import ELEMENTWISE, insert, rewrite

aten = torch.ops.aten


@rewrite(aten.slice.Tensor)
def slice_before_widening(graph: Graph, node: Node) -> Node | None:
    """`linear(x)[:, a:b]` -> `linear(x[:, a:b])`: rows are taken where they are narrow.

    Also through elementwise ops of one tensor, so that `logits[:, :-1]` becomes a slice of hidden states. The
    tensor may be read twice, as in `(logits * logits)[:, :-1]`.
    """
    chain: list[Node] = []
    source, dim, *rest = node.args
    if dim is None or not isinstance(source, Node):
        return None
    dim %= len(shape_of(source))
    while _rows_pass_through(source, dim, chain[-1] if chain else node):
        chain.append(source)
        source = source.args[0]
    if not chain:
        return None
    result = insert(graph, node, aten.slice.Tensor, source, dim, *rest)
    for op in reversed(chain):
        read, sliced = op.args[0], result
        args, kwargs = torch.fx.node.map_arg(
            (op.args, op.kwargs), lambda n, read=read, sliced=sliced: sliced if n is read else n
        )
        result = insert(graph, node, op.target, *args, **kwargs)
    return result


def _rows_pass_through(source: Node, dim: int, user: Node) -> bool:
    """True if an op, read by `user` alone, makes row i of its result from row i of its first operand."""
    if set(source.users) != {user} or not source.args or not _is_dynamic(shape_of(source)[dim]):
        return False
    tensors = [n for n in source.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    product = source.target is aten.linear.default and dim < len(shape_of(source)) - 1
    unary = source.target in ELEMENTWISE and len(tensors) == 1 and shape_of(tensors[0]) == shape_of(source)
    return (product or unary) and source.args[0] is tensors[0]


def _is_dynamic(size: sympy.Expr) -> bool:
    return bool(size.free_symbols)
