"""row_selections: ops on rows that are selected by their values become one op (`graph.ops.row_selection`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.facts import CapturedGraph, shape_of, tensors_of
from ..graph.ops.row_selection import RowSelection
from ..graph.purity import is_impure, is_random

VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
)


def row_selections(captured: CapturedGraph) -> CapturedGraph:
    """Put what is made of selected rows, up to where it is put back, into one node each; in place.

    What cannot be one stays as it is, and has no rows then.
    """
    graph = captured.module.graph
    selected = {n for n in graph.nodes if n.op == "call_function" and _has_size_of_values(n)}
    if not selected:
        return captured
    for region in _regions(graph, selected):
        _as_one_node(captured, region, selected)
    captured.module.recompile()
    return captured


def _has_size_of_values(node: Node) -> bool:
    """True for a value that has a size which the values of another one say."""
    value = node.meta.get("val")
    return value is not None and bool(free_unbacked_symbols(value))


def _regions(graph: Graph, selected: set[Node]) -> list[list[Node]]:
    """Nodes with such sizes that read each other, and those that read them; in graph order.

    Those that put rows into what the one before has put rows into are one, as of a loop over experts.
    """
    group: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        near = [n for n in node.all_input_nodes if n in selected]
        if node.op != "call_function" or not (near or node in selected):
            continue
        own = {node}.union(*(group[n] for n in near))
        group.update(dict.fromkeys(own, own))
    _join_chains(group, selected)
    order = {n: k for k, n in enumerate(graph.nodes)}
    regions = {id(g): g for g in group.values()}.values()
    return sorted((sorted(g, key=order.__getitem__) for g in regions), key=lambda g: order[g[0]])


def _join_chains(group: dict[Node, set[Node]], selected: set[Node]) -> None:
    for node in list(group):
        users = list(node.users)
        if node in selected or not users or not all(u in group for u in users):
            continue
        joined = group[node].union(*(group[u] for u in users))
        group.update(dict.fromkeys(joined, joined))


def _as_one_node(captured: CapturedGraph, region: list[Node], selected: set[Node]) -> None:
    graph, inside = captured.module.graph, set(region)
    results = [n for n in region if any(u not in inside for u in n.users)]
    other = any(is_impure(n) or is_random(n) for n in region)
    if other or len(results) != 1 or results[0] in selected:
        return
    result, operands = results[0], _operands(region, inside)
    plain = all(isinstance(n.meta.get("val"), torch.Tensor) for n in operands)
    like = next((k for k, n in enumerate(operands) if plain and _alike(n, result)), None)
    if like is None or not _is_convex(graph, inside, operands) or not _is_contiguous(result):
        return
    selection = RowSelection(_module_of(captured.module, region, operands, result), like)
    with graph.inserting_after(region[-1]):
        node = graph.call_function(selection, tuple(operands))
    node.meta = dict(result.meta)
    result.replace_all_uses_with(node, delete_user_cb=lambda user: user not in inside)
    for old in reversed(region):
        graph.erase_node(old)


def _is_contiguous(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_contiguous()


def _alike(node: Node, result: Node) -> bool:
    given, made = tensors_of(node)[0], tensors_of(result)[0]
    same = (given.dtype, given.device) == (made.dtype, made.device)
    return same and shape_of(node) == shape_of(result)


def _operands(region: Iterable[Node], inside: set[Node]) -> list[Node]:
    return list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))


def _is_convex(graph: Graph, inside: set[Node], operands: list[Node]) -> bool:
    """False if something that the region reads is made of what it makes."""
    later = set[Node]()
    for node in graph.nodes:
        if node not in inside and any(n in inside or n in later for n in node.all_input_nodes):
            later.add(node)
    return later.isdisjoint(operands)


def _say_sizes(node: Node) -> None:
    """Write out a size of a view that PyTorch cannot find where there are no rows."""
    if node.target in VIEWS and isinstance(node.args[1], (list, tuple)):
        made = node.meta["val"].shape
        sizes = [made[k] if s == -1 and isinstance(made[k], int) else s for k, s in enumerate(node.args[1])]
        node.args = (node.args[0], sizes)


def _module_of(root: GraphModule, region: list[Node], operands: list[Node], result: Node) -> GraphModule:
    graph = Graph()
    copies = {}
    for k, node in enumerate(operands):
        copies[node] = graph.placeholder(f"operand_{k}")
        copies[node].meta = dict(node.meta)
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        _say_sizes(copies[node])
    graph.output(copies[result])
    return GraphModule(root, graph)
