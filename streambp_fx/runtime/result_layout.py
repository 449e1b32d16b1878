"""Where results lie in memory: as the model's do, whose caller may view them, or change one in place.

NOTE [results that share memory]: segments write each value that is returned to memory of its own, in the
order of its dims. For the caller two things differ from the model then: `out.transpose(1, 2).view(-1, n)` may
not be possible, and of `return x, x.view(-1)` a change of one is not seen in the other. So a result is laid
out as the model has it, and what is a view of another result is made of that one, by the model's own ops. (Of
two results that overlap, neither of which holds all elements, each has memory of its own.) Two results that
are views of a third value, which is none, are both made of that value: the gradient of one of them, which
somebody may ask for, is not that of the other. And where the model goes on from a result, what segments read
of it is made of what the caller gets, for a hook on that may change the gradient of all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..passes.graph.facts import Facts, expression, shape_of, tensors_of
from ..passes.graph.subgraph import Subgraph
from ..passes.graph.symbols import in_numbers
from ..passes.s2_prove.inner_outputs import is_shown
from ..passes.s2_prove.scores import is_view
from ..passes.s6_schedule.program import StepInstruction
from .step_interpreter import StepFrame


@dataclass(frozen=True)
class _View:
    """A result that shares memory with another one.

    Attributes:
        of: what it is a view of: another result, or a value that is none.
        root: of what all of them are views.
        first: a result that has all elements of the root.
        part: makes the result of `of`.
    """

    of: Node
    root: Node
    first: Node
    part: Subgraph


class _SameNumbers(torch.autograd.Function):
    """A value that is there in another order in memory."""

    @staticmethod
    def forward(ctx: Any, laid_out: Tensor, there: Tensor) -> Tensor:
        """`there`, which has the shape, the dtype and the numbers of `laid_out`."""
        return there.view_as(there)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        """The gradient of `laid_out`."""
        return gradients[0], None


class ResultLayout:
    """How the results of a graph lie in memory.

    Args:
        facts: of the graph; what is lazy is no result of it.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        results = [n for n in dict.fromkeys(facts.outputs) if isinstance(n, Node) and tensors_of(n)]
        found = ((n, _order_in_memory(facts, n)) for n in results)
        self.orders = {n: order for n, order in found if order is not None}
        self.views = dict(_views(facts, results))
        kept = {*self.orders, *(n for n, view in self.views.items() if n is view.first)}
        self.gone_on_from = frozenset(n for n in kept if is_shown(facts, n))

    def lay_out(self, instruction: StepInstruction, frame: StepFrame) -> None:
        """Results that an instruction has made, and from which the model goes on."""
        made = (v.node for v in instruction.results if v.node in self.gone_on_from)
        for node in (n for n in made if n is not None and n in frame.values):
            value, view = frame.values[node], self.views.get(node)
            laid_out = self._ordered(node, value)
            if view is not None and view.first is node and view.of is view.root:
                base = laid_out.as_strided(*frame.shape_and_strides(view.root))
                frame.laid_out[view.root], laid_out = base, _made_of(base, view, frame)
            frame.laid_out[node] = laid_out
            frame.values[node] = _SameNumbers.apply(laid_out, value.detach())

    def apply(self, made: Sequence[Any], frame: StepFrame) -> list[Any]:
        """The model's outputs as the caller gets them.

        Args:
            made: what the step has made for each.
        """
        nodes = self.facts.outputs
        pairs = ((n, v) for n, v in zip(nodes, made, strict=True) if isinstance(n, Node))
        values = {n: frame.laid_out[n] if n in frame.laid_out else self._ordered(n, v) for n, v in pairs}
        alone = frame.step.own is None  # else only some of their rows are here
        bases = {**frame.laid_out, **values}
        for node, view in self.views.items() if alone else ():
            if node in frame.laid_out:
                continue
            if view.root not in bases:
                bases[view.root] = values[view.first].as_strided(*frame.shape_and_strides(view.root))
            made_again = _made_of(values.get(view.of, bases[view.root]), view, frame)
            # a view that was taken where gradients are off has none
            values[node] = made_again if node in self.facts.needs_grad else made_again.detach()
        return [values[n] if isinstance(n, Node) else v for n, v in zip(nodes, made, strict=True)]

    def _ordered(self, node: Node, value: Any) -> Any:
        order = self.orders.get(node)
        if order is None:
            return value
        back = sorted(range(len(order)), key=order.__getitem__)
        return value.permute(order).contiguous().permute(back)


def _made_of(base: Tensor, view: _View, frame: StepFrame) -> Tensor:
    given = [base if n is view.of else frame.value(n) for n in view.part.inputs]
    made: Tensor = view.part.module(*given)[0]
    return made


def _views(facts: Facts, results: list[Node]) -> Iterator[tuple[Node, _View]]:
    """Results that are made of another one, and how."""
    groups: dict[Node, list[Node]] = {}
    for node in results:
        groups.setdefault(_root(node), []).append(node)
    order = {n: k for k, n in enumerate(facts.nodes)}
    for root, group in groups.items():
        holds_all = [n for n in group if n is root or _is_whole(facts, n, root)]
        if len(group) == 1 or not holds_all:
            continue
        # of one that has no gradient the others would have none
        first = root if root in holds_all else max(holds_all, key=lambda n: n in facts.needs_grad)
        for node in sorted(group, key=order.__getitem__):
            if node is not root:
                of = _nearest(node, group)
                yield node, _View(of, root, first, Subgraph(facts, [node], {of}))


def _root(node: Node) -> Node:
    """What a value is a view of in the end."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _nearest(node: Node, results: list[Node]) -> Node:
    """What a view is made of: a result, or what it is a view of in the end."""
    own = node
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
        if node is not own and node in results:
            return node
    return node


def _is_whole(facts: Facts, node: Node, root: Node) -> bool:
    """True for a view of all elements of a value, both without holes."""
    sizes, others = shape_of(node), shape_of(root)
    same = sympy.simplify(sympy.Mul(*sizes) - sympy.Mul(*others)) == 0
    return same and _is_dense(facts, node) and _is_dense(facts, root)


def _is_dense(facts: Facts, node: Node) -> bool:
    strides = [expression(s) for s in tensors_of(node)[0].stride()]
    within = sympy.S.One
    for size, stride in sorted(
        zip(shape_of(node), strides, strict=True),
        key=lambda pair: in_numbers(pair[1], facts.values, unknown=2),
    ):
        if size != 1 and sympy.simplify(stride - within) != 0:
            return False
        within *= size
    return True


def _order_in_memory(facts: Facts, node: Node) -> tuple[int, ...] | None:
    """The dims of a result from the outermost in memory to the innermost; None for their own order."""
    strides = [in_numbers(expression(s), facts.values, unknown=2) for s in tensors_of(node)[0].stride()]
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return order if order != tuple(range(len(strides))) and all(strides) else None
