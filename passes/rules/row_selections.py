"""Rows that a mask selects, see NOTE [selected rows] in `graph.ops.row_selection`.

Where a mask of rows is true is an order of some of them (POSITIONS): an index by it gives rows in that order,
and what is put, or added, there lies where the rows were. How many they are does not matter for a proof, so
that in one they are as many as all (`s2_prove.row_selections`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import Layout, Local, LocalValue, NotSeparable, Role
from .registry import RuleContext, about, local_rule, rows_of, rule

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define("positions_where(Tensor mask, int dim) -> Tensor")
_LIBRARY.define("other_indices_where(Tensor mask, Tensor positions, int dim) -> Tensor")
# Set on a mask that is an operand of a selection.
ONE_OF_A_ROW = "one_of_a_row"
positions_where = torch.ops.streambp_fx.positions_where.default
other_indices_where = torch.ops.streambp_fx.other_indices_where.default


def _vector_of(mask: torch.Tensor, size: Any) -> torch.Tensor:
    return mask.new_empty((size,), dtype=torch.int64)


torch.library.register_fake(
    "streambp_fx::positions_where", lambda mask, dim: _vector_of(mask, mask.shape[dim]), lib=_LIBRARY
)
torch.library.register_fake(
    "streambp_fx::other_indices_where",
    lambda mask, positions, dim: _vector_of(mask, positions.shape[0]),
    lib=_LIBRARY,
)


@rule(positions_where)
def selected(ctx: RuleContext, node: Node) -> Layout:
    """Where a mask is true, along the dim of its rows: an order of some rows.

    Each of them is there once if the mask has no other dim.

    Raises:
        NotSeparable: its rows do not lie there.
    """
    mask, dim = node.args
    layout = ctx.layout(mask)
    axis = layout[dim]  # type: ignore[index]
    others = [a for d, a in enumerate(layout) if d != dim and a is not None]
    if axis is None or axis.role is not Role.ROW or axis.order is not None or axis.removed or others:
        raise NotSeparable("rows are selected by what is not a value of each row")
    ordered = dataclasses.replace(axis, order=node)
    ctx.facts.local[node] = LocalValue(Local.POSITIONS, node, axis, mask, ordered, selected=True)  # type: ignore[arg-type]
    return (ordered,)


@local_rule(other_indices_where)
def other_indices(ctx: RuleContext, node: Node) -> Layout:
    """Where a mask is true, along a dim without rows: a number of each selected row."""
    mask, positions, _ = node.args
    found = about(ctx, positions, Local.POSITIONS)
    if found.keys is not mask:
        raise NotSeparable("rows that another mask selects")
    ctx.seen.add(mask)  # type: ignore[arg-type]
    return (found.sorted_axis,)


def is_one_of_a_row(ctx: RuleContext, mask: Any) -> bool:
    """True for a mask that has one entry for each row, or is known to be true at one of them at most."""
    return ctx.rank(mask) == 1 or mask.meta.get(ONE_OF_A_ROW, False)


def indexed(ctx: RuleContext, node: Node) -> Layout:
    """Entries of rows: one index names the row, the others numbers in the dims beside it.

    Raises:
        NotSeparable: an index is something else.
    """
    layout, indices = rows_of(ctx, node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    found = _named(ctx, layout, indices)
    return (found.sorted_axis, *layout[len(indices) :])


def _named(ctx: RuleContext, layout: Layout, indices: list[Any]) -> LocalValue:
    """The positions among several indices of the first dims of a value: its rows lie in one of these dims.

    Raises:
        NotSeparable: an index is something else.
    """
    carrying = [d for d, a in enumerate(layout) if a is not None]
    if None in indices or len(carrying) != 1 or carrying[0] >= len(indices):
        raise NotSeparable("an index by positions in another dim")
    found = about(ctx, indices[carrying[0]], Local.POSITIONS)
    if layout[carrying[0]] != found.base:
        raise NotSeparable("an index by positions of other rows")
    for dim, at in enumerate(indices):
        if dim != carrying[0] and rows_of(ctx, at) != (found.sorted_axis,):
            raise NotSeparable("an index by numbers of other rows")
    return found


def put_at_several(ctx: RuleContext, call: dict[str, Any]) -> Layout:
    """Selected rows, put or added where they were, in a value that has other dims before its rows.

    Raises:
        NotSeparable: two of them may be put at one place, or something else is put there.
    """
    layout, indices = rows_of(ctx, call["self"]), list(call["indices"])
    found = _named(ctx, layout, indices)
    given = rows_of(ctx, call["values"])
    every = {d: _dim_of_mask(at, found.keys) for d, at in enumerate(indices)}
    distinct = sorted(every.values()) == list(range(ctx.rank(found.keys)))
    if not (call["accumulate"] or (found.selected and distinct)):
        raise NotSeparable("several rows may be put at one position")
    own_rows = (found.sorted_axis, *(None,) * (len(layout) - len(indices)))
    if given not in ((), own_rows):
        raise NotSeparable("rows at positions of others")
    return layout


def _dim_of_mask(index: Any, mask: Node) -> int:
    """Along which dim an index says where a mask is true; -1 if it is something else."""
    if index.target not in (positions_where, other_indices_where) or index.args[0] is not mask:
        return -1
    return index.args[-1]
