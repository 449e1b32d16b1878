"""Subgraphs as modules: the whole values, the epilogue, a segment that runs unchunked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from .facts import Facts, Kind
from .purity import is_random

# NOTE [weights with operations of their own]: a tensor subclass (a quantised weight) may override the
# function that people call, and not the op that it becomes.
PUBLIC = {torch.ops.aten.linear.default: torch.nn.functional.linear}


def _is_plain(node: Node) -> bool:
    """True for an op of PyTorch's, or of Python's on numbers and tuples."""
    op = node.target
    if isinstance(op, torch._ops.OpOverload):
        return op.namespace in ("aten", "prims")
    return node.op != "call_function" or getattr(op, "__module__", "") == "_operator"


class Subgraph:
    """Part of a graph as a module of its own.

    Attributes:
        inputs: nodes whose values are passed in, in order (sizes among them).
        outputs: nodes whose values come back.
        random: True if an op draws random numbers.
        frozen: positions of outputs that have no gradient.
        returned: positions of outputs that the graph returns.
        has_own_gradients: an op has a backward that its author wrote, which may keep what it returns.
    """

    def __init__(self, facts: Facts, outputs: list[Node], given: set[Node]) -> None:
        self.outputs = list(outputs)
        needed = made_of(outputs, lambda node: _comes_in(facts, node, given))
        graph = Graph()
        copies: dict[Node, Node] = {}
        self.inputs = [n for n in facts.nodes if n in needed and _comes_in(facts, n, given)]
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
        for node in facts.nodes:
            if node in needed and node not in copies:
                copies[node] = copied = graph.node_copy(node, copies.__getitem__)
                if any(n in facts.opaque for n in node.all_input_nodes):
                    copied.target = PUBLIC.get(node.target, node.target)
                if copied.target is torch.ops.aten.view.default:  # NOTE [strides of fake tensors]
                    copied.target = torch.ops.aten.reshape.default
        graph.output(tuple(copies[n] for n in outputs))
        self.module = GraphModule(facts.module, graph)
        self.random = any(is_random(n) for n in graph.nodes)
        self.has_own_gradients = not all(_is_plain(n) for n in graph.nodes)
        returned = set(facts.outputs)
        self.frozen = [k for k, n in enumerate(outputs) if n not in facts.needs_grad]
        self.returned = [k for k, n in enumerate(outputs) if n in returned]


def _comes_in(facts: Facts, node: Node, given: set[Node]) -> bool:
    return node in given or node.op in ("placeholder", "get_attr") or facts.kinds[node] is Kind.SIZE


def made_of(nodes: Iterable[Node], is_given: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """Nodes, and all that they are made of.

    Args:
        nodes: of a graph.
        is_given: True for a node of which it does not count what it is made of.
    """
    found, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(() if is_given(node) else node.all_input_nodes)
    return found
