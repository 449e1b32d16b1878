"""A traced program while it is rewritten: what may move where, new nodes, and the registry of rewrites."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from ..cost.storages import Storages, storage_of
from ..graph.facts import expression, shape_of, tensors_of
from ..graph.purity import is_impure

aten = torch.ops.aten

VIEWS = {aten.view.default, aten._unsafe_view.default}  # keep the order of the elements

FULL_PRECISION = {torch.float32, torch.float64}

END = 2**63 - 1


class Program:
    """A graph, its storages before it is rewritten, and whether it has values in float64."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.is_double = any(v.dtype == torch.float64 for n in graph.nodes for v in tensors_of(n))
        self.storages = Storages(graph)

    def stays(self, since: Node, *nodes: Node) -> bool:
        """True if values may be read at any time from `since` on: nothing changes them there any more."""
        keys = {self.storages.number(v) for n in nodes for v in tensors_of(n)}
        found = (self.storages.changes.get(key) for key in keys)
        return all(n is None or n < since for n in found)

    def insert(self, before: Node, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node, with its fake value; the source line and the origin are those of `like`."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
        evaluate(node)
        return node

    def replace(self, node: Node, new: Node) -> bool:
        """Use `new` for `node`, unless the two differ in form."""
        same = form(new) == form(node)
        if same:
            node.replace_all_uses_with(new)
        self.drop(node if same else new)
        return same

    def drop(self, node: Node) -> None:
        """Erase a node that nobody reads, and what was made for it alone."""
        pending = [node]
        while pending:
            node = pending.pop()
            if not node.users and not node._erased and not is_impure(node):
                pending.extend(node.all_input_nodes)
                self.graph.erase_node(node)


Simplification = Callable[[Program, Node], "Node | None"]

SIMPLIFICATIONS: dict[Any, list[Simplification]] = {}


def simplification(*ops: Any) -> Callable[[Simplification], Simplification]:
    """Register a rewrite: it returns the node to use instead, or None to leave the node alone."""

    def register(function: Simplification) -> Simplification:
        for op in ops:
            SIMPLIFICATIONS.setdefault(op, []).append(function)
        return function

    return register


def storages(*nodes: Node) -> set[int]:
    """Identities of the memory that the tensors of nodes lie in."""
    return {storage_of(v) for n in nodes for v in tensors_of(n)}


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of a node's (first) tensor."""
    return tensors_of(node)[0].dtype


def form(node: Node) -> tuple:
    """Shape, strides, dtype and device of a value; steps along a dim of one element mean nothing."""
    value = tensors_of(node)[0]
    sizes = tuple(expression(s) for s in value.shape)
    strides = (expression(s) if n != 1 else 0 for n, s in zip(sizes, value.stride(), strict=True))
    return (sizes, *strides, value.dtype, value.device)


def is_smaller(first: Node, second: Node) -> bool:
    """True if a value has fewer elements than another, whatever the sizes are."""
    more = sympy.expand(sympy.Mul(*shape_of(second)) - sympy.Mul(*shape_of(first)))
    return bool(more.is_positive)


def is_returned(node: Node) -> bool:
    """True if the program returns a value or a view of it."""
    return any(n.op == "output" or (is_view(n) and is_returned(n)) for n in node.users)


def is_view(node: Node) -> bool:
    """True if a result lies in the memory of an operand, or is one of several that an op gives."""
    known = node.target in VIEWS or node.target is operator.getitem
    return known or getattr(node.target, "is_view", False)


def evaluate(node: Node) -> None:
    """Give a node its fake value."""
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = next(v.fake_mode for n in node.all_input_nodes for v in tensors_of(n))  # type: ignore[attr-defined]
    with mode, enable_python_dispatcher(), torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
