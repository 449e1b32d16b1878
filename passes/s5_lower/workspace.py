"""workspace: the widest product of a program lies in memory that the caller keeps from one chunk to the next.

A chunk's logits are often too large for the C library to keep: it gives their memory back to the system, and
each page of those of the next chunk is fetched and cleared anew when it is first touched. On two cores that
takes about as long as a log-softmax. A GPU's allocator keeps what was freed, so this is for the CPU.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ..cost.storages import Storages
from ..graph.facts import shape_of
from .write_in_place import on_cpu

aten = torch.ops.aten
WITH_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out}


def widest_product(graph: Graph, storages: Storages) -> Node | None:
    """The product of the longest rows whose memory nobody reads after the program; None if there is none."""
    end = len(graph.nodes) - 1
    found: list[tuple[int, Node]] = []
    for node in graph.nodes:
        if node.target not in WITH_OUT or not on_cpu(node):
            continue
        (key,), width = storages.of[node], shape_of(node)[-1]
        if storages.is_inside(key) and storages.last(key) < end and width.is_Integer:
            found.append((int(width), node))
    return max(found, key=lambda pair: pair[0], default=(0, None))[1]


def into_workspace(module: GraphModule, product: Node) -> GraphModule:
    """The program with one more input at the end: a tensor without elements, which becomes the product.

    Its memory grows to what the product needs, and stays if the caller passes the tensor again.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    workspace: Node | None = None
    for node in module.graph.nodes:
        if workspace is None and node.op != "placeholder":
            workspace = graph.placeholder("workspace")
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node is product:
            copies[node].target = WITH_OUT[node.target]  # type: ignore[index]
            copies[node].kwargs = {**copies[node].kwargs, "out": workspace}
    return GraphModule(module, graph)
