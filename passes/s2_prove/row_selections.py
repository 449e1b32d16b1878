"""Selected rows: is each row that comes out of a `RowSelection` made of that row alone?

The ops of the selection are traced once more with all rows in the place of those that are selected, in an
order of which nothing is known: what the rules prove of them (`rules/row_selections.py`) holds for any part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...versions.differences import symbolic_sizes
from ..graph.facts import CapturedGraph, Facts, Layout, NotSeparable
from ..graph.fake_values import Environment
from ..graph.ops.row_selection import RowSelection
from ..graph.tracing import trace
from ..rules.row_orders import SAME_ENTRIES
from ..rules.row_selections import ONE_OF_A_ROW, other_indices_where, positions_where
from ..s1_capture.normalize import normalize
from .autograd_function_rows import FunctionCall, check_rows
from .emptiness import is_one_of_distinct

aten = torch.ops.aten
WHAT = "rows that are selected by their values"
WHERE = (aten.where.default, aten.nonzero_numpy.default)
# What makes a vector of one column.
FLATTENED = (*SAME_ENTRIES, aten.squeeze.default, aten.squeeze.dims)


class SelectionCall:
    """A call of a row selection, and the graph of its ops on all rows.

    Args:
        facts: of the graph that it is called in.
        node: the call.

    Attributes:
        captured: the graph; its placeholders are the operands, in order.
        merged: layouts of placeholders, as the operands have them.

    Raises:
        NotSeparable: what selects rows is no value of each row, or an op does not take all rows.
    """

    def __init__(self, facts: Facts, node: Node) -> None:
        assert isinstance(node.target, RowSelection)
        environment = Environment(facts.values)
        self.own = environment.symbols
        theirs = {theirs: own for own, theirs in self.own.items()}
        layouts = [facts.layouts.get(a) for a in node.args]  # type: ignore[arg-type]
        given = [environment.like(a.meta["val"]) for a in node.args]  # type: ignore[union-attr]
        captured = CapturedGraph(
            _traced(environment, node.target.module, layouts, given), sequence=theirs.get(facts.sequence)
        )
        self.merged: dict[Node, Layout] = {}
        placeholders = (n for n in captured.module.graph.nodes if n.op == "placeholder")
        for operand, placeholder, value, layout in zip(node.args, placeholders, given, layouts, strict=True):
            placeholder.meta.setdefault("val", value)
            placeholder.meta[ONE_OF_A_ROW] = is_one_of_distinct(operand)
            captured.differentiable.add(placeholder)  # data as well: a chunk has its own
            if layout is not None:
                self.merged[placeholder] = FunctionCall.translated(layout, theirs)
        self.captured = normalize(captured)

    def layout(self, inner: Facts) -> Layout:
        """The layout of the result by the rules of the ops.

        Args:
            inner: kinds and axes of `captured`.

        Raises:
            NotSeparable: a row is made of others.
        """
        (result,) = inner.results
        check_rows(inner, [result], WHAT)
        layout = inner.layouts[result]
        axes = [a for a in layout or () if a is not None]
        if layout is None or len(axes) != 1 or axes[0].order is not None:
            raise NotSeparable(f"{WHAT} and not put back")
        return FunctionCall.translated(layout, self.own)


def _traced(
    environment: Environment, module: GraphModule, layouts: list[Layout | None], given: list[Any]
) -> GraphModule:
    def on_all_rows(*operands: Tensor) -> list[Tensor]:
        return [_OnAllRows(module, layouts).run(*operands)]

    try:
        with environment.mode, torch.no_grad(), symbolic_sizes():
            return trace(on_all_rows, *given, pre_dispatch=True)
    except NotSeparable:
        raise
    except Exception as error:  # whatever an op makes of other sizes
        reason = str(error).strip().split("\n", 1)[0]
        raise NotSeparable(f"{WHAT}, whose ops do not take all rows ({reason})") from error


class _OnAllRows(Interpreter):
    """Runs the ops of a selection with all rows for those that are selected.

    Args:
        module: the ops.
        layouts: of the operands.
    """

    def __init__(self, module: GraphModule, layouts: list[Layout | None]) -> None:
        super().__init__(module)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.layouts = dict(zip(placeholders, layouts, strict=True))
        self.selected: dict[Node, list[Tensor]] = {}  # by mask: for each of its dims an index
        self.columns: dict[Any, list[Tensor]] = {}  # of what holds these indices as columns

    def run_node(self, n: Node) -> Any:
        """Run an op; of one that selects rows, the positions of all of them.

        Raises:
            NotSeparable: what selects rows is no operand with rows.
        """
        if n.target in WHERE:
            return self._indices(n.args[0])
        if n.target is aten.nonzero.default:
            self.columns[n] = self._indices(n.args[0])
            return torch.stack(self.columns[n], 1)
        column = self._column(n)
        if column is not None:
            return column
        if n.target in (aten.index.Tensor, aten.index_put.default):
            source, indices, *rest = n.args
            loaded = torch.fx.node.map_arg((source, rest, dict(n.kwargs)), self.env.__getitem__)
            return n.target(loaded[0], self._loaded(indices), *loaded[1], **loaded[2])
        return super().run_node(n)

    def _loaded(self, indices: Any) -> list[Tensor | None]:
        """Indices of an op, where a mask is as many as it has dims."""
        found: list[Tensor | None] = []
        for index in indices:
            mask = index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
            own = self._indices(index) if mask else [None if index is None else self.env[index]]
            found += own
        return found

    def _column(self, node: Node) -> Any:
        """What an op takes of indices that are columns; None for another op."""
        known = node.args[0] if node.args else None
        columns = self.columns.get(known) if isinstance(known, Node) else None
        if columns is None:
            return None
        if node.target is aten.select.int and node.args[1] in (1, -1):
            return columns[node.args[2]]  # type: ignore[index]
        if node.target is aten.unbind.int and node.args[1:] in ((1,), (-1,)):
            return columns
        flat = len(columns) == 1 and node.target in FLATTENED and node.meta["val"].dim() == 1
        return columns[0] if flat else None

    def _indices(self, mask: Any) -> list[Tensor]:
        if mask not in self.selected:
            rows = [d for d, a in enumerate(self.layouts.get(mask) or ()) if a is not None]
            if len(rows) != 1:
                raise NotSeparable("rows are selected by what has none")
            value, (dim,) = self.env[mask], rows
            positions = positions_where(value, dim)
            self.selected[mask] = [other_indices_where(value, positions, d) for d in range(value.dim())]
            self.selected[mask][dim] = positions
        return self.selected[mask]
