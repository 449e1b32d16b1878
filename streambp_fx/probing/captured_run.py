"""A captured graph, run once on real inputs, op by op; and where the rows of an op's operands lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..passes.graph.facts import Axis, Facts, Kind, Layout, Role, shape_of
from ..passes.graph.op_arguments import arguments
from ..passes.graph.ops.causal_convolution import CAUSAL_CONV1D
from ..passes.graph.ops.recurrence import RECURRENCE
from ..passes.graph.subgraph import made_of
from ..passes.graph.symbols import evaluate_size
from ..passes.rules.op_sets import ALIGNED
from ..passes.s4_trace.chunk_ops import layout_of_targets
from ..runtime.segments.owned_buffers import attribute
from ..runtime.step_sizes import read_sizes, size_places
from .poisoned_rows import Operand, Rows

aten = torch.ops.aten
# Where the ops that mix rows take the operands that they read by columns.
COLUMNS: dict[Any, tuple[int | str, ...]] = {
    aten.scaled_dot_product_attention.default: (1, 2, "key", "value"),
    aten.baddbmm.default: (2, "batch2"),
    CAUSAL_CONV1D: (0, "input"),
    RECURRENCE: (1, "operands"),
    aten.gather.default: (),
}
PRODUCT_COLUMNS: tuple[int | str, ...] = (1, "other", "mat2")
Substitute = Callable[[Node, bool], Any]


class CapturedRun:
    """The values of a graph on real inputs, and ops that are run again with some of their operands replaced.

    Args:
        facts: of the graph, after all passes.
        inputs: of the graph, in the order of its placeholders.
        seed: of what replaces rows of operands.

    Attributes:
        values: of the nodes that were run and are still needed.
        regions: for each product with masked weights, the values that its weights are made of.
    """

    def __init__(self, facts: Facts, inputs: Sequence[Any], seed: int = 0) -> None:
        self.facts, self.seed = facts, seed
        placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        self.inputs = dict(zip(placeholders, inputs, strict=True))
        self.sizes = read_sizes(size_places(facts), inputs)
        self.values: dict[Node, Any] = {}
        self.regions = {n: _region(facts, n) for n, m in facts.mixings.items() if not facts.has_columns(n)}

    def _lifetimes(self, first: Iterable[Node] = ()) -> tuple[list[Node], dict[int, list[Node]]]:
        """Nodes that the outputs are made of, and, by position, the values that are needed there last.

        Values without a gradient are kept: what is proved of a mask may depend on them (`_for_this_batch`).

        Args:
            first: nodes that are to be there before all others.
        """
        output = next(n for n in self.facts.nodes if n.op == "output")
        early, needed = made_of(first), made_of(output.all_input_nodes)
        order = [n for n in self.facts.nodes if n in early]
        order += [n for n in self.facts.nodes if n in needed - early]
        last: dict[Node, int] = {}
        for position, node in enumerate(order):
            # a product with masked weights is tried together with what its weights are made of
            for reader in (node, *self.regions.get(node, ())):
                last.update(dict.fromkeys((reader, *reader.all_input_nodes), position))
        found: dict[int, list[Node]] = {}
        for node, position in last.items():
            if self.facts.kinds[node] not in (Kind.WHOLE, Kind.SIZE):
                found.setdefault(position, []).append(node)
        return order, found

    def _value(self, node: Node) -> None:
        if self.facts.kinds[node] is Kind.SIZE:
            self.values[node] = evaluate_size(node, lambda expr: int(expr.subs(self.sizes)))
        elif node.op == "placeholder":
            self.values[node] = self.inputs[node]
        elif node.op == "get_attr":
            self.values[node] = attribute(self.facts, node)
        else:
            self.values[node] = self._call(node, lambda n, column: self.values[n])

    def _call(self, node: Node, value: Substitute) -> Any:
        """The node's op; `value` gives its operands and is told whether they are read by columns.

        An operand may be read both ways (`attention(x, x, x)`), so what counts is its place.
        """
        columns = self._columns(node)

        def given(place: int | str, argument: Any) -> Any:
            return torch.fx.node.map_arg(argument, lambda n: value(n, place in columns))

        args = [given(k, a) for k, a in enumerate(node.args)]
        return node.target(*args, **{k: given(k, a) for k, a in node.kwargs.items()})  # type: ignore[operator]

    def _columns(self, node: Node) -> tuple[int | str, ...]:
        """Places of the operands that a node reads by columns."""
        return COLUMNS.get(node.target, PRODUCT_COLUMNS) if node in self.facts.mixings else ()

    def _operands(self, node: Node, columns: bool) -> list[Node]:
        """Tensor operands that are read by columns, or those that are not."""
        found: list[Node] = []

        def look(operand: Node, column: bool) -> None:
            if column is columns and isinstance(self.values[operand], Tensor):
                found.append(operand)

        self._visit(node, look)
        return list(dict.fromkeys(found))

    def _visit(self, node: Node, look: Callable[[Node, bool], None]) -> None:
        columns = self._columns(node)
        for place, argument in (*enumerate(node.args), *node.kwargs.items()):
            torch.fx.node.map_arg(argument, lambda n, place=place: look(n, place in columns))

    def _column_operands(self, node: Node) -> dict[Node, Operand]:
        if node not in self.facts.mixings:
            return {}
        found = {n: self._rows(n, self.facts.layouts.get(n), Role.ROW) for n in self._operands(node, True)}
        return {n: Operand(self.values[n], rows, self.seed) for n, rows in found.items() if rows is not None}

    def _own_rows(self, node: Node, operand: Node) -> Rows | None:
        """Rows of an operand that is not read by columns, as a chunk would slice it; None if it has none."""
        kind, layout = self.facts.kinds[operand], self.facts.layouts.get(operand)
        if kind is Kind.STREAM:
            return self._rows(operand, layout, Role.ROW)
        if kind is not Kind.WHOLE:
            return None
        if node.target is aten.scaled_dot_product_attention.default:
            return None  # a mask: its columns are proved, and its rows are built one by one
        if node.target in ALIGNED or (node.target is aten.baddbmm.default and node.args[0] is operand):
            result = self.facts.layouts[node] or ()
            layout = result[len(result) - self.values[operand].dim() :] if self.values[operand].dim() else ()
        if node.target is aten.cross_entropy_loss.default and operand is arguments(node)["target"]:
            layout = layout_of_targets(self.facts, node)
        return self._rows(operand, layout, Role.ROW)

    def _rows(self, node: Node, layout: Layout | None, role: Role) -> Rows | None:
        shape = shape_of(node)
        for dim, axis in enumerate(layout or ()):
            if axis is not None and axis.role is role and self.facts.sequence in shape[dim].free_symbols:
                return self._along(self.values[node], dim, axis)
        return None

    def _along(self, value: Tensor, dim: int, axis: Axis) -> Rows:
        outer, inner = (int(e.subs(self.sizes)) for e in (axis.outer, axis.inner))
        return Rows(dim, outer, value.shape[dim] // (outer * inner), inner)


def _region(facts: Facts, node: Node) -> list[Node]:
    """The (row, column) values that a product with values is made of, in graph order."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        sources = [n for n in pending.pop().all_input_nodes if n not in found]
        inner = [n for n in sources if facts.kinds[n] is Kind.STREAM and facts.has_columns(n)]
        found.update(inner)
        pending.extend(inner)
    return [n for n in facts.nodes if n in found]
