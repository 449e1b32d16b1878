"""Custom autograd functions: are the rows of forward and backward made of the rows of what they read?

NOTE [both directions]: a chunk of such a function is its author's forward and backward on the chunk's rows.
So the rules have to hold for the ops of both, and the gradient of what has rows must have its rows. What the
function reads besides (a quantised weight) may go through any op, but no gradient may come to it.

NOTE [backwards that are not linear]: the backward of a function may give something where it is given zero (a
regulariser that is added to the gradient), or not twice as much for twice the gradient (one that clips). Such
a function is chunked where its backward runs once for each row, on the whole of that row's gradient, as
autograd has it. So its rows are all run, also those without a part in the loss; a loss head with it does not
take its gradient before that of the loss is known; a segment with it has one result with a gradient, since
autograd does not run a backward to which no gradient comes; and logits made by it are not lazy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ...versions.differences import symbolic_sizes
from ..graph.autograd_functions import CustomFunction, Retrace
from ..graph.facts import (
    Axis,
    CapturedGraph,
    Facts,
    Kind,
    Layout,
    NotSeparable,
    Role,
    operands,
    shape_of,
    tensors_of,
)
from ..graph.fake_values import Environment
from ..graph.functionalization import changes_something, functional
from ..graph.memory import Memory
from ..graph.purity import is_random
from ..graph.refusals import NotPureError
from ..graph.tracing import trace
from ..rules.pointwise import pointwise_ops
from ..rules.size_operands import check_sizes, mentions
from ..s1_capture.normalize import normalize
from .linear_loss import is_homogeneous

WHAT = "a custom autograd function"
_POINTWISE = frozenset(pointwise_ops())


def has_linear_backward(facts: Facts, node: Node) -> bool:
    """True if the backward of a custom autograd function is proved to be linear in what it is given.

    Such a function of a weight may be called in each chunk: the sum of its gradients is that of the sum.
    """
    try:
        return FunctionCall(facts, node).is_linear()
    except NotSeparable:
        return False


class FunctionCall:
    """A call of a custom autograd function, and the graph of its forward and backward.

    Args:
        facts: of the graph that the function is called in.
        node: the call.

    Attributes:
        tensors: its arguments that are tensors.
        captured: a graph whose results are the outputs and then the gradients.
        outputs: how many outputs there are.
        merged: of its inputs in which rows are merged with other dims (`view(-1, width)`), the layouts.
        gradients: for each argument that may have one, the index of its gradient among the results.

    Raises:
        NotSeparable: the function cannot be looked into.
    """

    def __init__(self, facts: Facts, node: Node) -> None:
        assert isinstance(node.target, CustomFunction)
        self.facts, self.node, self.function = facts, node, node.target
        self.tensors = [a for a in node.args if isinstance(a, Node) and tensors_of(a)]
        self.gradients: list[int | None] = []
        try:
            traced = self._traced()
        except Exception as error:  # whatever somebody's function makes of values that are symbols
            reason = str(error).strip().split("\n", 1)[0]
            raise NotSeparable(f"{WHAT} that cannot be looked into ({reason})") from error
        try:
            self.captured = normalize(traced)
        except NotPureError as error:
            raise NotSeparable(f"{WHAT} that cannot be looked into ({error})") from error
        graph = self.captured.module.graph
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.results = list(graph.output_node().args[0])
        self.merged = self._merged()

    def _merged(self) -> dict[Node, Layout]:
        """Those of arguments. A gradient that is given has its rows in dims of the size of theirs."""
        found: dict[Node, Layout] = {}
        known: dict[sympy.Expr, Axis] = {}
        for argument, placeholder in zip(self.node.args, self.placeholders, strict=False):
            layout = self.facts.layouts.get(argument) if isinstance(argument, Node) else None
            axes = [a for a in layout or () if a is not None]
            plain = all(a.role is Role.ROW and a.order is None and not a.removed for a in axes)
            if layout is None or not plain or all(a.simple for a in axes):
                continue
            found[placeholder] = self.translated(layout, self.theirs)
            for axis, size in zip(found[placeholder], shape_of(placeholder), strict=True):
                if axis is not None:
                    known[size] = axis
        for placeholder in self.placeholders[len(self.node.args) :]:
            given = tuple(known.get(size) for size in shape_of(placeholder))
            if any(given):
                found[placeholder] = given
        return found

    @staticmethod
    def translated(layout: Layout, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> Layout:
        """A layout in the symbols of another graph."""
        return tuple(
            a and replace(a, outer=a.outer.xreplace(symbols), inner=a.inner.xreplace(symbols)) for a in layout
        )

    def _traced(self) -> CapturedGraph:
        environment = Environment(self.facts.values)
        given = [environment.like(a.meta["val"] if isinstance(a, Node) else a) for a in self.node.args]
        with environment.mode, torch.no_grad(), symbolic_sizes():
            made = _leaves(Retrace(self.function.forward).run(*given)[0])
            self.outputs = len(made)
            cotangents = [torch.empty_like(o) for o in made]
            flat = (*given, *cotangents)
            traced = trace(self._both, *flat, pre_dispatch=True)
            if any(map(changes_something, traced.graph.nodes)):
                traced = self._functional(flat)
        self.own = environment.symbols
        self.theirs = {own: theirs for theirs, own in self.own.items()}
        captured = CapturedGraph(traced, sequence=self.theirs.get(self.facts.sequence))
        placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        for placeholder, value in zip(placeholders, flat, strict=True):
            placeholder.meta.setdefault("val", value)
            # What has rows is streamed here, even without a gradient: the function sees those of a chunk.
            if tensors_of(placeholder) and any(
                captured.sequence in s.free_symbols for s in shape_of(placeholder)
            ):
                captured.differentiable.add(placeholder)
        return captured

    def _functional(self, flat: tuple[Any, ...]) -> GraphModule:
        """The graph of a function that changes, in place, what it has made itself."""
        written = list[int]()
        traced = trace(functional(self._both, Memory(), written), *flat, pre_dispatch=True)
        if written:
            raise NotSeparable("it changes what it is given")
        return traced

    def _both(self, *flat: Any) -> list[torch.Tensor]:
        count = len(self.node.args)
        output, saved = Retrace(self.function.forward).run(*flat[:count])
        results = _leaves(output)
        self.gradients = []
        for gradient in _leaves(Retrace(self.function.backward).run(*flat[count:], *saved)):
            made = isinstance(gradient, torch.Tensor)
            self.gradients.append(len(results) if made else None)
            results += [gradient] if made else []
        return results

    def is_linear(self) -> bool:
        """True if the backward is proved to be linear in what it is given, and zero where that is zero."""
        cotangents, nodes = self.placeholders[len(self.node.args) :], list(self.captured.module.graph.nodes)
        return all(is_homogeneous(nodes, cotangents, gradient) for gradient in self.results[self.outputs :])

    def is_elementwise(self) -> bool:
        """True if every value has the shape of the arguments, or no dims, and is made entry by entry."""
        shapes = {shape_of(n) for n in self.placeholders if tensors_of(n)}
        if len(shapes) != 1 or any(shape_of(n) not in shapes for n in self.results):
            return False
        values = (n for n in self.captured.module.graph.nodes if n.op == "call_function" and tensors_of(n))
        return all(shape_of(n) in shapes | {()} and _by_entries(n) for n in values)

    def layout(self, inner: Facts) -> Layout:
        """The layout of the outputs by the rules of the ops.

        Args:
            inner: kinds and axes of `captured`.

        Raises:
            NotSeparable: a row is made of others.
        """
        pairs = self._gradients()
        check_rows(inner, (*self.results[: self.outputs], *(made for _, made in pairs)))
        for argument, placeholder in zip(self.node.args, self.placeholders, strict=False):
            known = isinstance(argument, Node) and tensors_of(argument)
            outer = self.facts.layouts.get(argument) if known else None
            if known and (outer is None or inner.layouts[placeholder] != self.translated(outer, self.theirs)):
                raise NotSeparable(f"{WHAT} of rows that lie in an unusual place")
        if any(inner.layouts[p] != inner.layouts[made] for p, made in pairs):
            raise NotSeparable(f"{WHAT} whose gradient has its rows in another place")
        given = self.placeholders[len(self.node.args) :]
        made = self.results[: self.outputs]
        if any(inner.layouts[p] != inner.layouts[n] for p, n in zip(given, made, strict=True)):
            raise NotSeparable(f"{WHAT} that is given a gradient with its rows in another place")
        layouts = {self.translated(inner.layouts[n] or (), self.own) for n in made}
        layout = layouts.pop() if len(layouts) == 1 else None
        if layout is None or sum(a is not None for a in layout) != 1:
            raise NotSeparable(f"{WHAT} whose results do not all hold the rows of its operands")
        return layout

    def _gradients(self) -> list[tuple[Node, Node]]:
        """Arguments to which a gradient comes, as placeholders, each with that gradient."""
        found = []
        for k, place in enumerate(self.gradients):
            argument = self.node.args[k]
            if place is None or argument not in self.facts.needs_grad:
                continue
            if not self.facts.carries(argument):
                raise NotSeparable(f"{WHAT} that makes the gradient of a weight")
            found.append((self.placeholders[k], self.results[place]))
        return found


def _by_entries(node: Node) -> bool:
    return node.target in _POINTWISE and not is_random(node) and not any(map(_is_size, operands(node)))


def check_rows(inner: Facts, wanted: Iterable[Node], what: str = WHAT) -> None:
    """Check that nothing that the results are made of reads other rows, or the number of rows.

    Args:
        inner: kinds and axes of a graph that is one op of another graph.
        wanted: its results.
        what: what the op is, for the reason.

    Raises:
        NotSeparable: something does.
    """
    pending = list(wanted)
    needed = set(pending)
    while pending:
        new = [n for n in operands(pending.pop()) if n not in needed]
        needed.update(new)
        pending.extend(new)
    for node in inner.nodes:  # in order, so that the cause comes before what follows from it
        if node in needed:
            _check_value(inner, node, what)


def _check_value(inner: Facts, node: Node, what: str) -> None:
    if node in inner.refusals:
        raise NotSeparable(f"{what}: {inner.refusals[node]}")
    schema = getattr(node.target, "_schema", None)
    if is_random(node) or (schema is not None and schema.is_mutable):
        raise NotSeparable(f"{what} that uses {node.target}")
    if node in inner.mixings or node in inner.slices:
        raise NotSeparable(f"{what} that reads other rows ({node.target})")
    if tensors_of(node):
        if inner.carries(node) and inner.kind(node) is not Kind.STREAM:
            raise NotSeparable(f"{what} that counts its rows ({node.target})")
        check_sizes(inner, node, "number of rows")
    elif node.op == "placeholder" and mentions(inner, node):
        raise NotSeparable(f"{what} that is given the number of rows")


def _leaves(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _is_size(node: Node) -> bool:
    """True for a number that is made of sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
