"""Rows that are sorted, worked on in that order, and brought back: how a mixture of experts dispatches.

See NOTE [rows that are sorted] in `graph.facts`. `LOCAL_RULES` are the rules of ops that are given something
about an order; nobody else sees it. What they prove:

- `sort` gives the sorted rows, and the positions that they had among the rows that were sorted (POSITIONS);
- an index by positions gives rows in that order, and a sum into positions brings them back;
- the order of the positions (`argsort`) is where each row has gone (PLACES); an index by it brings rows back;
- counts of the keys and their running sums (COUNTS, ENDS) say where the rows of a key end, if the rows are
  sorted by these keys, ascending, and each key is counted. A grouped product multiplies each row by the
  weights of its key, which then depends on the row alone.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.facts import Kind, Layout, Local, LocalValue, NotSeparable, Role, expression, shape_of
from ..graph.op_arguments import arguments
from .registry import RuleContext, about, local_rule, normalize_dim, rows_of, rule
from .row_selections import indexed, is_one_of_a_row, put_at_several

aten = torch.ops.aten
#: Integers up to here are exact in float32, and bins of `histc` of width 1 - 1/n hold one of them each.
EXACT = 4096
SORTS = (aten.sort.default, aten.sort.stable)
CASTS = (aten.to.dtype, aten._to_copy.default)
# Views that have all entries of their operand, each once.
SAME_ENTRIES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.t.default,
    aten.contiguous.default, aten.clone.default,
)  # fmt: skip
VIEWS = (*SAME_ENTRIES, aten.expand.default, aten.slice.Tensor, aten.select.int)
# Ops whose second result, or whose only one, are indices into a dim of their operand.
SELECTIONS = (aten.topk.default, *SORTS, aten.max.dim, aten.min.dim)
INDICES = (aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable)
# Ops whose entries are all from one of their operands.
JOINED = (aten.cat.default, aten.stack.default)
# Values that are the same everywhere, or not set yet, in the shape of an operand.
FILLS = (
    aten.zeros_like.default, aten.empty_like.default, aten.full_like.default, aten.ones_like.default,
)  # fmt: skip


# ---- where an order comes from


def sorted_rows(ctx: RuleContext, node: Node) -> Layout:
    """A sort of a vector of rows: what it gives is in an order, and says which.

    Raises:
        NotSeparable: what is sorted is no plain vector of rows.
    """
    call = arguments(node)
    keys = call["self"]
    layout = ctx.layout(keys)
    axis = layout[0] if len(layout) == 1 else None
    if axis is None or axis.role is not Role.ROW or axis.order is not None:
        raise NotSeparable("a scan along the sequence axis")
    if ctx.facts.kinds.get(keys) is not Kind.STREAM:
        raise NotSeparable("a sort of rows that are data")  # whose order would be that of all rows
    kind = Local.SORTED if isinstance(node.meta["val"], (tuple, list)) else Local.POSITIONS
    # the order of descending rows is that of keys which nobody counts
    root = node if call["descending"] else _root(keys)
    ordered = dataclasses.replace(axis, order=node)
    ctx.facts.local[node] = LocalValue(kind, node, axis, root, ordered)
    return (ordered,)


@rule(aten.histc.default)
def histogram(ctx: RuleContext, node: Node) -> Layout:
    """How many rows have each key, where keys are whole numbers that are proved to be counted."""
    call = arguments(node)
    counted, bins = call["self"], call["bins"]
    axes = [a for a in ctx.layout(counted) if a is not None]
    keys = _root(counted)
    exact = isinstance(bins, int) and 1 < bins <= EXACT and (call["min"], call["max"]) == (0, bins - 1)
    streamed = len(axes) == 1 and ctx.facts.kinds.get(counted) is Kind.STREAM
    if not (exact and streamed and _is_integer(keys) and _is_below(keys, bins)):
        raise NotSeparable("a reduction over the sequence axis")
    ctx.facts.local[node] = LocalValue(Local.COUNTS, None, axes[0], keys)
    return (None,)


def _root(node: Node) -> Node:
    """The keys that a value holds: those of another shape, cast, or sorted, are the same keys."""
    while True:
        if _is_exact_cast(node) or node.target in SAME_ENTRIES:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is operator.getitem and node.args[1] == 0 and node.args[0].target in SORTS:  # type: ignore[union-attr]
            node = arguments(node.args[0])["self"]  # type: ignore[arg-type]
        else:
            return node


def _is_exact_cast(node: Node) -> bool:
    """True for a cast of integers to a dtype in which those up to `EXACT` are exact."""
    exact = (torch.int32, torch.int64, torch.float32, torch.float64)
    return node.target in CASTS and node.meta["val"].dtype in exact and _is_integer(node.args[0])


def _is_integer(node: Any) -> bool:
    return node.meta["val"].dtype in (torch.int32, torch.int64)


def _is_below(node: Node, bound: int) -> bool:
    """True if whole numbers are proved to be in [0, bound)."""
    found = _end(node)
    return found is not None and found <= bound


def _end(node: Any) -> int | None:
    """A number above all of these whole numbers, none of which is below 0; None if nothing is proved.

    Indices into a dim are below its size; some of them may be replaced by a number, the largest among them.
    """
    while node.target in VIEWS or _is_exact_cast(node):
        node = node.args[0]
    if node.target is aten.masked_fill.Scalar:
        return _end_of_filled(arguments(node))
    if node.target in JOINED:
        ends = [_end(part) for part in node.args[0]]
        return None if None in ends else max(ends, default=0)  # type: ignore[type-var]
    second = node.target is operator.getitem and node.args[1] == 1
    source: Any = node.args[0] if second else node
    if source.target not in (SELECTIONS if second else INDICES):
        return None
    call = arguments(source)
    shape, dim = shape_of(call["self"]), call["dim"]
    size = sympy.Mul(*shape) if dim is None or not shape else shape[dim]
    return int(size) if size.is_Integer else None


def _end_of_filled(call: dict[str, Any]) -> int | None:
    source, mask, number = call["self"], call["mask"], call["value"]
    end = _end(source)
    if end is None or not isinstance(number, int) or number < 0:
        return None
    if mask.target in (aten.eq.Scalar, aten.ge.Scalar) and mask.args[0] is source:
        largest = mask.args[1] == end - 1 and isinstance(mask.args[1], int)
        end -= largest
    return max(end, number + 1)


# ---- ops that are given something about an order


@local_rule(operator.getitem)
def result(ctx: RuleContext, node: Node) -> Layout:
    """Of a sort: rows in their order, or the positions that they had."""
    found = about(ctx, node.args[0], Local.SORTED)
    if node.args[1] == 1:
        ctx.facts.local[node] = dataclasses.replace(found, kind=Local.POSITIONS)
    return ctx.facts.layouts[node.args[0]]  # type: ignore[index, return-value]


@local_rule(*CASTS)
def cast(ctx: RuleContext, node: Node) -> Layout:
    """Whole numbers of another dtype."""
    source: Any = node.args[0]
    found = about(ctx, source, Local.POSITIONS, Local.PLACES, Local.COUNTS, Local.ENDS)
    dtypes = (torch.int64, torch.int32) if found.kind in (Local.COUNTS, Local.ENDS) else (torch.int64,)
    if node.meta["val"].dtype not in dtypes:
        raise NotSeparable(f"a cast of {found.kind.value} that may round")
    ctx.facts.local[node] = found
    return ctx.facts.layouts[source]  # type: ignore[return-value]


@local_rule(aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
def divided(ctx: RuleContext, node: Node) -> Layout:
    """Positions of pairs (row, choice), divided by the number of choices, are those of rows."""
    found = about(ctx, node.args[0], Local.POSITIONS)
    inner = sympy.cancel(found.base.inner / _number(node.args[1]))
    if node.kwargs.get("rounding_mode", "floor") is None or sympy.fraction(inner)[1] != 1:
        raise NotSeparable("positions are divided by what is not the number of entries of a row")
    ctx.facts.local[node] = dataclasses.replace(found, base=dataclasses.replace(found.base, inner=inner))
    return ctx.facts.layouts[node.args[0]]  # type: ignore[index, return-value]


@local_rule(aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar)
def remainder(ctx: RuleContext, node: Node) -> Layout:
    """Positions of pairs (row, choice) modulo the number of choices: which choice of its row each is."""
    found = about(ctx, node.args[0], Local.POSITIONS)
    if sympy.fraction(sympy.cancel(found.base.inner / _number(node.args[1])))[1] != 1:
        raise NotSeparable("a remainder of positions by what is not the number of entries of a row")
    return ctx.facts.layouts[node.args[0]]  # type: ignore[index, return-value]


def _number(value: Any) -> sympy.Expr:
    """A positive whole number that an op is given.

    Raises:
        NotSeparable: it is something else.
    """
    value = value.meta.get("val") if isinstance(value, Node) else value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise NotSeparable("positions are divided by what is no whole number")
    number = expression(value)
    if number.is_Integer and number <= 0:
        raise NotSeparable("positions are divided by what is not positive")
    return number


@local_rule(aten.unsqueeze.default, aten.expand.default, aten.expand_as.default, aten.repeat.default)
def widened(ctx: RuleContext, node: Node) -> Layout:
    """Positions of rows beside each entry of them."""
    source: Any = node.args[0]
    found = about(ctx, source, Local.POSITIONS)
    axis, sizes = ctx.facts.layouts[source][0], shape_of(node)  # type: ignore[index]
    later = any(isinstance(n, Node) and ctx.facts.carries(n) for n in node.all_input_nodes[1:])
    if sizes[0] != shape_of(source)[0] or later:
        raise NotSeparable("positions of rows are put in another place")
    ctx.facts.local[node] = found
    return (axis, *(None,) * (len(sizes) - 1))


@local_rule(aten.argsort.default, aten.argsort.stable)
def inverse(ctx: RuleContext, node: Node) -> Layout:
    """Where each row has gone: the order of the positions."""
    call = arguments(node)
    found = about(ctx, call["self"], Local.POSITIONS)
    if call["descending"] or ctx.rank(call["self"]) != 1 or not found.covers:
        raise NotSeparable("an order of positions that do not name each row once")
    ctx.facts.local[node] = dataclasses.replace(found, kind=Local.PLACES)
    return (found.base,)


@local_rule(aten.index.Tensor, aten.index_select.default)
def index(ctx: RuleContext, node: Node) -> Layout:
    """Rows at positions, in their order; or rows in their order at their places, which brings them back."""
    if node.target is aten.index.Tensor and sum(i is not None for i in node.args[1]) > 1:  # type: ignore[union-attr]
        return indexed(ctx, node)
    source, (dim, at) = node.args[0], _index_of(node)
    found = about(ctx, at, Local.POSITIONS, Local.PLACES)
    layout = rows_of(ctx, source)
    before, after = found.base, found.sorted_axis
    if found.kind is Local.PLACES:
        before, after = after, before
    if layout[dim] != before:
        raise NotSeparable("an index by positions of other rows")
    return (*layout[:dim], after, *layout[dim + 1 :])


def _index_of(node: Node) -> tuple[int, Any]:
    """The dim that a vector indexes, and nothing but that, and the vector.

    Raises:
        NotSeparable: another dim is indexed, or several.
    """
    if node.target is aten.index_select.default:
        call = arguments(node)
        found = [(normalize_dim(call["dim"], len(shape_of(call["self"]))), call["index"])]
    else:
        found = [(d, at) for d, at in enumerate(node.args[1]) if at is not None]  # type: ignore[arg-type]
    if len(found) != 1 or len(shape_of(found[0][1])) != 1:
        raise NotSeparable("an index by positions in another dim")
    return found[0]


@local_rule(aten.index_put.default)
def put(ctx: RuleContext, node: Node) -> Layout:
    """Rows in their order, put or added where they were."""
    call = arguments(node)
    first, *others = call["indices"]
    if any(i is not None for i in others):
        return put_at_several(ctx, call)
    return _brought_back(ctx, node, call["self"], first, call["values"], call["accumulate"])


@local_rule(aten.index_add.default, aten.index_copy.default)
def added(ctx: RuleContext, node: Node) -> Layout:
    """Rows in their order, added to those at their positions."""
    call = arguments(node)
    if normalize_dim(call["dim"], ctx.rank(node)) != 0:
        raise NotSeparable("an index by positions in another dim")
    adds = node.target is aten.index_add.default
    return _brought_back(ctx, node, call["self"], call["index"], call["source"], adds)


@local_rule(aten.scatter_add.default, aten.scatter.src)
def scattered(ctx: RuleContext, node: Node) -> Layout:
    """Rows in their order, put or added where they were; positions are beside each entry."""
    call = arguments(node)
    if normalize_dim(call["dim"], ctx.rank(node)) != 0 or shape_of(call["index"]) != shape_of(call["src"]):
        raise NotSeparable("an index by positions in another dim")
    adds = node.target is aten.scatter_add.default
    return _brought_back(ctx, node, call["self"], call["index"], call["src"], adds)


def _brought_back(ctx: RuleContext, node: Node, base: Any, at: Any, rows: Any, adds: bool) -> Layout:
    """The layout of rows at their positions: those of `base`, to which they are added or which they replace.

    Raises:
        NotSeparable: two of them may be put at one position, or something is in another order.
    """
    found = about(ctx, at, Local.POSITIONS)
    given, own = rows_of(ctx, rows), shape_of(node)
    distinct = found.covers or (found.selected and is_one_of_a_row(ctx, found.keys))
    if not adds and not distinct:
        raise NotSeparable("several rows may be put at one position")
    if not given or given[0] != found.sorted_axis or len(given) != len(own) or shape_of(rows)[1:] != own[1:]:
        raise NotSeparable("rows at positions of others")
    wanted = (found.base, *given[1:])
    if base.target in FILLS and ctx.facts.kinds.get(base) is Kind.STREAM:
        ctx.seen.add(base)  # the same everywhere
    elif rows_of(ctx, base) != wanted:
        raise NotSeparable("rows are brought back among rows that lie in another place")
    if any(a is not None for a in given[1:]):
        raise NotSeparable("rows with another sequence beside them")
    return wanted


@local_rule(aten.cumsum.default)
def running_sum(ctx: RuleContext, node: Node) -> Layout:
    """Where the rows of each key end."""
    found = about(ctx, node.args[0], Local.COUNTS)
    if node.meta["val"].dtype not in (torch.int32, torch.int64, torch.float32, torch.float64):
        raise NotSeparable("a running sum that may round")
    ctx.facts.local[node] = dataclasses.replace(found, kind=Local.ENDS)
    return (None,)


@local_rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_product(ctx: RuleContext, node: Node) -> Layout:
    """Each row times the weights of its key: rows are sorted by what is counted, and all of it is."""
    call: Any = arguments(node)
    rows, weights = node.args[:2]
    if call.get("bias") is not None:
        raise NotSeparable("a grouped product with a bias")
    found = about(ctx, call["offs"], Local.ENDS)
    layout = rows_of(ctx, rows)
    axis = layout[0]
    if len(layout) != 2 or axis is None or axis.order is None or layout[1] is not None:
        raise NotSeparable("a grouped product of rows that are not sorted")
    if ctx.facts.local[axis.order].keys is not found.keys:
        raise NotSeparable("a grouped product of rows that are sorted by something else than is counted")
    if ctx.facts.carries(weights) or len(shape_of(weights)) != 3 or weights in ctx.facts.local:
        raise NotSeparable("a grouped product whose weights carry the sequence")
    return (axis, None)
