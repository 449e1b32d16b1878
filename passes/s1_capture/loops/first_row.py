"""Bodies of loops of which the first row is another step than the others.

NOTE [the first row]: in `if h is None: h = f(row) else: h = g(row, h)` the first row is one step and each
other row another. Both are traced, one after the other, in one body; `other_rows` says where the second one
begins, and `first_row` which result is whose. Before anything is run the body is taken apart again
(`halves`): each row runs its own step and nothing else. To compute both and choose would be wrong, as what is
not chosen may have a gradient that is not finite.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node


class NotApart(Exception):
    """The step of the first row and that of the others cannot be told apart."""


@torch.compiler.allow_in_graph
def first_row(first: Tensor, other: Tensor) -> Tensor:
    """Stands in the body of a loop for what the first row gives and what others give. It is never run.

    Args:
        first, other: of one shape, dtype and device.

    Raises:
        NotApart: they are not, or they are no fake tensors.
    """
    if not isinstance(first, FakeTensor) or not isinstance(other, FakeTensor):
        raise NotApart("the step of a first row is run with that of others")
    if first.shape != other.shape or first.dtype != other.dtype or first.device != other.device:
        raise NotApart("the first row gives another shape or dtype than the others")
    return torch.where(torch.ones((), dtype=torch.bool, device=first.device), first, other)


@torch.compiler.allow_in_graph
def other_rows(row: Tensor) -> Tensor:
    """The row, of any shape: what is traced from here on is the step of the other rows."""
    return row.clone()


def halves(module: GraphModule) -> tuple[GraphModule | None, GraphModule]:
    """What the body of a loop does with the first row, and with each other row.

    Args:
        module: the body; it is not changed.

    Returns:
        Two bodies with the same inputs; None and the body itself, if it does the same with all rows.

    Raises:
        NotApart: the step of the other rows reads something of the first one's.
    """
    if not any(n.target in (first_row, other_rows) for n in module.graph.nodes):
        return None, module
    if module not in _halves:
        _halves[module] = _half(module, 0), _half(module, 1)
    return _halves[module]


_halves: weakref.WeakKeyDictionary[GraphModule, tuple[GraphModule, GraphModule]] = weakref.WeakKeyDictionary()


def _half(module: GraphModule, chosen: int) -> GraphModule:
    """The step of the first row (0) or that of others (1). All ops of it are kept: one may be in place."""
    graph, values = Graph(), _Values()
    nodes = list(module.graph.nodes)
    border = next((k for k, n in enumerate(nodes) if n.target is other_rows), None)
    if border is None:
        raise NotApart("where the step of the other rows begins is not known")
    for k, node in enumerate(nodes):
        if node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], values.__getitem__))
        elif node.target is first_row:
            values[node] = values[node.args[chosen]]
        elif node.target is other_rows and chosen:
            values[node] = values[node.args[0]]
        elif node.op in ("placeholder", "get_attr") or (k < border) == (chosen == 0) or _is_number(node):
            values[node] = graph.node_copy(node, values.__getitem__)
    return GraphModule(module, graph)


class _Values(dict[Node, Node]):
    def __missing__(self, node: Node) -> Node:
        raise NotApart(f"a step reads {node}, which the other one makes")


def _is_number(node: Node) -> bool:
    """True for sizes, which are read once for both."""
    value = node.meta.get("example_value")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size))
