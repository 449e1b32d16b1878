"""gradient_edges: to which operands of an op a gradient of its result comes, as autograd says.

NOTE [gradients that are None]: eager leaves the gradient of a parameter None where no gradient comes to it,
and an optimizer with weight decay then leaves it alone. Zeros are something else. Which operands an op gives
gradients to is not in its schema (`x.view_as(y)` gives `y` none, `zeros_like` none at all), so the op is run
on fake tensors, and autograd is asked. An op that cannot be run so is taken to give all of them one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..graph.autograd_functions import CustomFunction
from ..graph.facts import Facts, operands, tensors_of
from ..graph.fake_values import Environment
from ..graph.ops.row_selection import RowSelection

Key = tuple[Any, ...]


class GradientEdges:
    """Answers for the ops of one graph; the same call is asked once.

    Args:
        values: of the size symbols of the graph, see `Environment`.
    """

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self.environment = Environment(values)
        self._known: dict[Key, tuple[bool, ...]] = {}

    def of(self, node: Node, differentiated: Collection[Node]) -> list[Node]:
        """Those of the operands in `differentiated` that a gradient of the node's value comes to."""
        wanted = [n for n in operands(node) if n in differentiated]
        if not wanted or node.op != "call_function" or not any(map(_is_differentiable, tensors_of(node))):
            return []
        if isinstance(node.target, CustomFunction):
            return [n for n in wanted if _author_gives(node, n)]
        if isinstance(node.target, RowSelection):
            return self._of_selection(node, wanted)
        key = _key(node, wanted)
        if key not in self._known:
            self._known[key] = self._ask(node, wanted)
        return [n for n, comes in zip(wanted, self._known[key], strict=True) if comes]

    def sources(self, nodes: Iterable[Node], differentiated: set[Node]) -> dict[Node, list[Node]]:
        """By value with a gradient, the operands that it comes to; these values join `differentiated`."""
        found: dict[Node, list[Node]] = {}
        for node in nodes:
            own = self.of(node, differentiated)
            if own:
                differentiated.add(node)
                found[node] = own
        return found

    def _of_selection(self, node: Node, wanted: list[Node]) -> list[Node]:
        """Of many operands: its ops are asked one by one, as parts of it may have no gradient."""
        nodes = node.target.module.graph.nodes  # type: ignore[union-attr]
        own = dict(zip((n for n in nodes if n.op == "placeholder"), node.args, strict=True))
        asked = set(wanted)
        sources = self.sources(nodes, {n for n, operand in own.items() if operand in asked})
        (output,) = (n for n in nodes if n.op == "output")
        comes_to = _reached(sources, output.all_input_nodes)
        given = {operand for n, operand in own.items() if n in comes_to}
        node.target.given = {k for k, n in enumerate(own) if n in comes_to}  # type: ignore[union-attr]
        return [n for n in wanted if n in given]

    def _ask(self, node: Node, wanted: list[Node]) -> tuple[bool, ...]:
        try:
            if not self._requires_grad(node, wanted):
                return (False,) * len(wanted)
            return tuple(len(wanted) == 1 or self._requires_grad(node, [n]) for n in wanted)
        except Exception:
            return (True,) * len(wanted)

    def _requires_grad(self, node: Node, differentiated: Collection[Node]) -> bool:
        """True if the op's value has a gradient where these operands have one."""

        def value(operand: Node) -> Any:
            leaf = lambda v: self._leaf(v, operand in differentiated)  # noqa: E731
            return pytree.tree_map(leaf, operand.meta["val"])

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        with self.environment.mode, enable_python_dispatcher(), torch.enable_grad():
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        return any(v.requires_grad for v in pytree.tree_leaves(found) if isinstance(v, Tensor))

    def _leaf(self, value: Any, differentiated: bool) -> Any:
        own = self.environment.like(value)
        if isinstance(own, Tensor):
            own.requires_grad_(differentiated and _is_differentiable(own))
        return own


def reached(facts: Facts, nodes: Iterable[Node], ends: Collection[Node] = ()) -> set[Node]:
    """Everything that a gradient of these values comes to, they among it.

    Args:
        facts: of the graph, with `sources`.
        nodes: values that have a gradient.
        ends: values at which the gradients stop.
    """
    return _reached(facts.sources, nodes, ends)


def _reached(
    sources: Mapping[Node, list[Node]], nodes: Iterable[Node], ends: Collection[Node] = ()
) -> set[Node]:
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [] if node in ends else sources.get(node, ())
    return found


def _is_differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _author_gives(node: Node, operand: Node) -> bool:
    """True if the backward of a custom function returns something for an operand."""
    given = node.target.backward.graph.output_node().args[0]  # type: ignore[union-attr]
    given = given if isinstance(given, (tuple, list)) else [given]
    places = [k for k, a in enumerate(node.args) if a is operand]
    return any(k >= len(given) or given[k] is not None for k in places)


def _key(node: Node, wanted: list[Node]) -> Key:
    """What the answer depends on: op, dtypes and ranks, which operands are asked about, other arguments."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    described = [
        (wanted.index(v) if v in wanted else -1, *((t.dtype, t.dim()) for t in tensors_of(v)))
        if isinstance(v, Node)
        else str(v)
        for v in leaves
    ]
    return node.target, str(spec), *described
