"""Ops of PyTorch's that call functions of their own, replaced by what they do (`REPLACED`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ..graph.ops.recurrence import RECURRENCE_LAST
from .block_tables import without_tables
from .flex_attention import FLEX, replaced_attention
from .loops.scans import SCAN, replaced_scan


def without_last(graph: Graph, node: Node) -> list[Node]:
    """Remove the last state of a recurrence, with the views of it, if nobody reads it."""
    pending, found = [node], list[Node]()
    while pending:
        one = pending.pop()
        if one is not node and (one.op != "call_method" or one.target not in ("narrow", "view")):
            return []
        found.append(one)
        pending += one.users
    for one in sorted(found, reverse=True):
        graph.erase_node(one)
    return []


#: By op: replaces a call of it in a graph, and returns nodes that nobody reads any more.
REPLACED: dict[Any, Callable[[Graph, Node], list[Node]]] = {
    FLEX: replaced_attention,
    SCAN: replaced_scan,
    RECURRENCE_LAST: without_last,
}


def without_higher_order_ops(module: GraphModule) -> GraphModule:
    """A Dynamo graph in which these ops, also within regions, are calls of what they do.

    Args:
        module: the Dynamo graph, which is not changed; returned as it is if there is none of them in it.
    """
    inner = [m for m in module.modules() if isinstance(m, GraphModule)]
    if not any(n.target in REPLACED for m in inner for n in m.graph.nodes if n.op == "call_function"):
        return module
    graph = Graph()
    copies: dict[Node, Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    graph.output_node().meta = dict(module.graph.output_node().meta)
    children = {
        n: without_higher_order_ops(c) if isinstance(c, GraphModule) else c
        for n, c in module.named_children()
    }
    copied = GraphModule(module, graph)
    for name, child in children.items():
        setattr(copied, name, child)
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target in REPLACED]
    without_tables(graph, [unread for n in calls for unread in REPLACED[n.target](graph, n)])
    copied.recompile()
    return copied
