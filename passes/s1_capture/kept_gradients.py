"""kept_gradients: a rewrite keeps to which inputs a gradient comes, also one of zeros.

NOTE [gradients of zeros]: the value of `torch.cat([x, w[:0]])` is `x`, and that of `y` behind `y[:] = x` as
well. Eager gives what made `w` and the old `y` a gradient of zeros, which an optimizer with weight decay
takes for one; without these operands it would be None. So each rewrite is asked whether an input is lost:
first by dtypes alone, and only where it seems so by what autograd says of each op on the way.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..graph.facts import CapturedGraph
from ..graph.fake_values import Environment
from ..graph.refusals import NotPureError


class KeptGradients:
    """To which inputs of a graph gradients of its values come, before it is rewritten.

    Args:
        captured: whose graph will be rewritten.
    """

    def __init__(self, captured: CapturedGraph) -> None:
        self.graph, self.values = captured.module.graph, captured.values
        self.bits = {n: 1 << k for k, n in enumerate(sorted(captured.differentiable, key=str))}
        self.seeming: dict[Node, int] = {}
        self.asked: dict[Node, int] = {}
        self.never = 0  # what seemed to be lost, and has no gradient of the value
        for node in self.graph.nodes:
            self._inputs(node, self.seeming)
        self.returned = [self.seeming[n] for n in self._outputs()]

    @cached_property
    def environment(self) -> Environment:
        """What ops are tried in: what some take for granted of sizes must not become true of the graph."""
        return Environment(self.values)

    def lost(self, node: Node, replacement: Node) -> bool:
        """True if some input would get no gradient of a value any more.

        Args:
            node: the value.
            replacement: what is to be read in its place.
        """
        seem = self._inputs(node, self.seeming) & ~self._inputs(replacement, self.seeming)
        if seem and self._inputs(node, self.asked) & ~self._inputs(replacement, self.asked):
            return True
        self.never |= seem
        return False

    def check(self) -> None:
        """Check what the rewritten graph returns.

        Raises:
            NotPureError: an input has lost its gradient.
        """
        found: dict[Node, int] = {}
        for before, node in zip(self.returned, self._outputs(), strict=True):
            if before & ~self._inputs(node, found) & ~self.never:
                raise NotPureError("an input has a gradient of zeros, which would be lost", node)

    def _inputs(self, node: Node, known: dict[Node, int]) -> int:
        """The inputs, as bits; in `known` are those of other values."""
        pending = [node]
        while pending:
            last = pending[-1]
            operands = [] if last in known or not _may_have_gradient(last) else last.all_input_nodes
            missing = [n for n in operands if n not in known]
            pending += missing
            if not missing:
                pending.pop()
                if last not in known:
                    known[last] = self._own(last, operands, known)
        return known[node]

    def _own(self, node: Node, operands: list[Node], known: dict[Node, int]) -> int:
        given = [n for n in operands if known[n]]
        if known is self.asked and given:
            given = [n for n in given if self._gives(node, n)]
        found = self.bits.get(node, 0)
        for operand in given:
            found |= known[operand]
        return found

    def _outputs(self) -> list[Node]:
        return [v for v in pytree.tree_leaves(self.graph.output_node().args) if isinstance(v, Node)]

    def _gives(self, node: Node, operand: Node) -> bool:
        """True if autograd gives an operand a gradient of the op's value, or cannot be asked."""

        def given(read: Node) -> Any:
            def leaf(value: Any) -> Any:
                own = self.environment.like(value)
                if isinstance(own, Tensor):
                    own.requires_grad_(read is operand and _is_differentiable(own))
                return own

            return pytree.tree_map(leaf, read.meta["val"])

        if not isinstance(node.target, torch._ops.OpOverload):
            return True
        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given)
            with self.environment.mode, enable_python_dispatcher(), torch.enable_grad():
                made = node.target(*args, **kwargs)
        except Exception:
            return True
        return any(v.requires_grad for v in pytree.tree_leaves(made) if isinstance(v, Tensor))


def _may_have_gradient(node: Node) -> bool:
    if node.target is torch.ops.aten.detach.default:
        return False
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return "val" not in node.meta or any(map(_is_differentiable, values))


def _is_differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
