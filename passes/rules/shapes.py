"""Views and other ops that move, merge or split dims."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.facts import (
    ROW_AXIS,
    Axis,
    Kind,
    Layout,
    NotSeparable,
    Role,
    expression,
    shape_of,
    tensors_of,
)
from ..graph.op_arguments import arguments
from .registry import RuleContext, forbid, merge_axis, normalize_dim, rule

aten = torch.ops.aten


# Views whose second operand only lends its sizes.
LIKE_ANOTHER = (aten.view_as.default, aten.reshape_as.default, aten.expand_as.default)


@rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.reshape_as.default,
)  # fmt: skip
def view(ctx: RuleContext, node: Node) -> Layout:
    """Dims are grouped from the left until the products agree; an axis keeps what it is merged with."""
    source = node.args[0]
    assert isinstance(source, Node)
    if node.target in LIKE_ANOTHER:
        ctx.ignores(arguments(node)["other"])
    return regroup(ctx.layout(source), shape_of(source), shape_of(node))


def regroup(layout: Layout, before: tuple[sympy.Expr, ...], after: tuple[sympy.Expr, ...]) -> Layout:
    """Layout after a view from sizes `before` to sizes `after`.

    Dims of size 1 hold nothing and are left out; the others are grouped from the left until the products
    agree. In the group that holds the sequence, the output dim that covers it keeps what it is merged with
    as `outer` and `inner`.

    Raises:
        NotSeparable: the view is no regrouping of dims.
    """
    result: list[Axis | None] = [None] * len(after)
    left = [d for d, s in enumerate(before) if s != 1]
    right = [d for d, s in enumerate(after) if s != 1]
    while left and right:
        group_in, group_out = [left.pop(0)], [right.pop(0)]
        size_in, size_out = before[group_in[0]], after[group_out[0]]
        while sympy.expand(size_in - size_out) != 0:
            grow_input = _smaller(size_in, size_out)
            if not (left if grow_input else right):
                raise NotSeparable(f"view from {before} to {after} is not a regrouping of dims")
            if grow_input:
                group_in.append(left.pop(0))
                size_in *= before[group_in[-1]]
            else:
                group_out.append(right.pop(0))
                size_out *= after[group_out[-1]]
        _place_axis(layout, before, after, group_in, group_out, result)
    if left or right:
        raise NotSeparable(f"view from {before} to {after} is not a regrouping of dims")
    return tuple(result)


def _smaller(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Compare two sizes at large prime values of their symbols (the result is checked exactly later).

    Raises:
        NotSeparable: one of them has no value there: a number that the sequence divides leaves nothing.
    """
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    point = {s: sympy.prime(10_000 + 97 * k) for k, s in enumerate(symbols)}
    try:
        return bool(first.subs(point) < second.subs(point))
    except ZeroDivisionError:
        raise NotSeparable(f"a view whose sizes are {first} and {second}") from None


def _place_axis(
    layout: Layout,
    before: tuple[sympy.Expr, ...],
    after: tuple[sympy.Expr, ...],
    group_in: list[int],
    group_out: list[int],
    result: list[Axis | None],
) -> None:
    carrying = [d for d in group_in if layout[d] is not None]
    if not carrying:
        return
    if len(carrying) > 1:
        raise NotSeparable("a view merges two sequence axes")
    dim = carrying[0]
    axis = layout[dim]
    assert axis is not None
    outer = sympy.Mul(*(before[d] for d in group_in if d < dim)) * axis.outer
    inner = sympy.Mul(*(before[d] for d in group_in if d > dim)) * axis.inner
    before_dim, after_dim = sympy.S.One, sympy.Mul(*(after[d] for d in group_out))
    for d in group_out:
        after_dim = sympy.cancel(after_dim / after[d])
        if _whole(outer / before_dim) and _whole(inner / after_dim):
            outer, inner = sympy.cancel(outer / before_dim), sympy.cancel(inner / after_dim)
            if axis.order is not None and (outer, inner) != (axis.outer, axis.inner):
                raise NotSeparable("a view of sorted rows that takes entries of a row apart, or together")
            result[d] = dataclasses.replace(axis, outer=outer, inner=inner)
            return
        before_dim = before_dim * after[d]
    raise NotSeparable(f"a view splits the sequence axis: {before} to {after}")


def _whole(quotient: sympy.Expr) -> bool:
    """True if the quotient of two sizes has no denominator."""
    return sympy.fraction(sympy.cancel(quotient))[1] == 1


@rule(aten.transpose.int)
def transpose(ctx: RuleContext, node: Node) -> Layout:
    """The dim that carries the sequence moves with the two dims that change places."""
    call = arguments(node)
    layout = list(ctx.layout(call["self"]))
    if layout:
        a, b = (normalize_dim(call[d], len(layout)) for d in ("dim0", "dim1"))
        layout[a], layout[b] = layout[b], layout[a]
    return tuple(layout)


@rule(aten.permute.default)
def permute(ctx: RuleContext, node: Node) -> Layout:
    """The dim that carries the sequence moves with the others."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    return tuple(layout[normalize_dim(d, len(layout))] for d in call["dims"])


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def transpose_last(ctx: RuleContext, node: Node) -> Layout:
    """A transposed matrix: the dim that carries the sequence moves with it."""
    layout = ctx.layout(node.args[0])
    if node.target is aten.mT.default:
        return (*layout[:-2], layout[-1], layout[-2])
    return tuple(reversed(layout))


@rule(aten.unsqueeze.default)
def unsqueeze(ctx: RuleContext, node: Node) -> Layout:
    """A new dim of size 1 carries nothing; the others keep what they carry."""
    call = arguments(node)
    layout = list(ctx.layout(call["self"]))
    layout.insert(normalize_dim(call["dim"], len(layout) + 1), None)
    return tuple(layout)


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(ctx: RuleContext, node: Node) -> Layout:
    """Dims of size 1 go; the others keep what they carry."""
    call = arguments(node)
    source = call["self"]
    layout, shape = ctx.layout(source), shape_of(source)
    given = call.get("dim", range(len(shape)))
    dims = [given] if isinstance(given, int) else list(given)
    drop = {d % len(shape) for d in dims if shape and shape[d % len(shape)] == 1}
    return tuple(a for d, a in enumerate(layout) if d not in drop)


@rule(aten.expand.default, aten.broadcast_to.default, aten.expand_as.default)
def expand(ctx: RuleContext, node: Node) -> Layout:
    """Dims of size 1 are repeated; along the sequence parameters alone, which are the same in all rows."""
    source = node.args[0]
    if node.target in LIKE_ANOTHER:
        ctx.ignores(arguments(node)["other"])
    layout, before, after = ctx.layout(source), shape_of(source), shape_of(node)
    lead = len(after) - len(before)
    if ctx.facts.kind(source) is Kind.CONSTANT and after.count(ctx.facts.sequence) == 1:
        return tuple(ROW_AXIS if size == ctx.facts.sequence else None for size in after)
    for dim, size in enumerate(after):
        grown = dim < lead or before[dim - lead] != size
        if grown and ctx.facts.sequence in size.free_symbols:
            raise NotSeparable("a value is repeated along the sequence axis")
    return (None,) * lead + layout


@rule(aten.slice.Tensor)
def slice_(ctx: RuleContext, node: Node) -> Layout:
    """Off the sequence, rows stay rows; a fixed number of rows may be cut from the sequence's ends."""
    call = arguments(node)
    source, layout = call["self"], ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    axis = layout[dim]
    if axis is None:
        return _rows_of_a_table(ctx, node, layout, dim)
    removed = sympy.expand(shape_of(source)[dim] - shape_of(node)[dim])
    if axis != Axis(removed=axis.removed) or call["step"] != 1 or not removed.is_Integer:
        raise NotSeparable(f"a slice of the sequence axis (dim {dim})")
    ctx.facts.slices.add(node)
    return (*layout[:dim], Axis(removed=axis.removed + int(removed)), *layout[dim + 1 :])


def _rows_of_a_table(ctx: RuleContext, node: Node, layout: Layout, dim: int) -> Layout:
    """A slice of a dim that is not the sequence; `positions[:length]` of a parameter makes rows of it.

    Such a slice stands alone, as a value by rows that later segments slice.
    """
    size, sequence = shape_of(node)[dim], ctx.facts.sequence
    if sequence not in size.free_symbols:
        return layout
    if size != sequence:
        raise NotSeparable(f"a slice of dim {dim} whose length depends on the sequence")
    if ctx.facts.kinds[node] is Kind.STREAM:
        ctx.facts.slices.add(node)
    return (*layout[:dim], Axis(), *layout[dim + 1 :])


@rule(aten.select.int)
def select(ctx: RuleContext, node: Node) -> Layout:
    """One entry of a dim without the sequence: rows stay rows."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    forbid(layout, [dim], "a selection on")
    if (
        isinstance(call["index"], Node)
        and ctx.facts.sequence in expression(call["index"].meta["val"]).free_symbols
    ):
        raise NotSeparable("an entry whose place is the length of the sequence")
    return layout[:dim] + layout[dim + 1 :]


@rule(aten.diagonal.default)
def diagonal(ctx: RuleContext, node: Node) -> Layout:
    """The diagonal of two dims without the sequence is a new last dim."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dims = [normalize_dim(call[d], len(layout)) for d in ("dim1", "dim2")]
    forbid(layout, dims, "a diagonal over")
    return (*(axis for dim, axis in enumerate(layout) if dim not in dims), None)


@rule(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
def split(ctx: RuleContext, node: Node) -> Layout:
    """Parts of a dim without the sequence: rows stay rows."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    forbid(layout, [normalize_dim(call["dim"], len(layout))], "a split of")
    return layout


@rule(aten.unbind.int)
def unbind(ctx: RuleContext, node: Node) -> Layout:
    """The entries of a dim without the sequence, one by one: rows stay rows."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    dim = normalize_dim(call["dim"], len(layout))
    forbid(layout, [dim], "an unbind of")
    return layout[:dim] + layout[dim + 1 :]


@rule(aten.cat.default)
def cat(ctx: RuleContext, node: Node) -> Layout:
    """Joined along a dim without the sequence, of operands that agree on their rows."""
    call = arguments(node)
    layout = joined(ctx, call["tensors"])
    forbid(layout, [normalize_dim(call["dim"], len(layout))], "a concatenation along")
    return layout


@rule(aten.stack.default)
def stack(ctx: RuleContext, node: Node) -> Layout:
    """Joined along a new dim, of operands that agree on their rows."""
    call = arguments(node)
    layout = list(joined(ctx, call["tensors"]))
    layout.insert(normalize_dim(call["dim"], len(layout) + 1), None)
    return tuple(layout)


def joined(ctx: RuleContext, parts: Any) -> Layout:
    """The common layout of operands that are joined along a dim without the sequence.

    Raises:
        NotSeparable: the operands do not all carry the sequence in the same dims.
    """
    result: Layout | None = None
    for part in parts:
        layout = ctx.layout(part)
        if result is None:
            result = layout
        elif len(result) != len(layout):
            raise NotSeparable("joined operands do not all have the same dims")
        else:
            result = tuple(merge_axis(a, b) for a, b in zip(result, layout, strict=True))
            if any((a is None) != (b is None) for a, b in zip(result, layout, strict=True)):
                raise NotSeparable("joined operands do not all carry the sequence")
    assert result is not None
    return result


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(ctx: RuleContext, node: Node) -> Layout:
    """Repeated along a dim without the sequence (heads of grouped attention), or each row several times."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    if call["dim"] is None:
        raise NotSeparable("repeat_interleave flattens its operand")
    dim = normalize_dim(call["dim"], len(layout))
    axis = layout[dim]
    if axis is None:
        return layout
    if axis.role is not Role.ROW or axis.order is not None or not isinstance(call["repeats"], int):
        raise NotSeparable(f"a repetition along the sequence axis (dim {dim})")
    repeated = dataclasses.replace(axis, inner=axis.inner * call["repeats"])
    return (*layout[:dim], repeated, *layout[dim + 1 :])


@rule(aten.repeat.default, aten.tile.default)
def repeat(ctx: RuleContext, node: Node) -> Layout:
    """Repeated along dims without the sequence, or all rows one time after the other."""
    layout, counts = ctx.layout(node.args[0]), node.args[1]
    rank = max(len(counts), len(layout))
    result = [*(None,) * (rank - len(layout)), *layout]
    counts = [1] * (rank - len(counts)) + list(counts)  # only `tile` may be given fewer
    for dim, count in enumerate(counts):
        axis = result[dim]
        if axis is None or count == 1:
            continue
        if axis.role is not Role.ROW or axis.order is not None or not isinstance(count, int):
            raise NotSeparable("a value is repeated along the sequence axis")
        result[dim] = dataclasses.replace(axis, outer=axis.outer * count)
    return tuple(result)


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(ctx: RuleContext, node: Node) -> Layout:
    """Padded along dims without the sequence."""
    layout, amounts = ctx.layout(node.args[0]), node.args[1]
    touched = [len(layout) - 1 - k // 2 for k, amount in enumerate(amounts) if amount != 0]
    forbid(layout, touched, "padding of")
    return layout


@rule(aten.flip.default)
def flip(ctx: RuleContext, node: Node) -> Layout:
    """Reversed along dims without the sequence."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    forbid(layout, [normalize_dim(d, len(layout)) for d in call["dims"]], "a flip of")
    return layout


@rule(aten.roll.default)
def roll(ctx: RuleContext, node: Node) -> Layout:
    """Rotated along dims without the sequence."""
    call = arguments(node)
    layout = ctx.layout(call["self"])
    if not call["dims"]:
        raise NotSeparable("a roll over the flattened tensor")
    forbid(layout, [normalize_dim(d, len(layout)) for d in call["dims"]], "a roll of")
    return layout


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(ctx: RuleContext, node: Node) -> Layout:
    """`arange(T)` counts the rows; any other range that mentions T is not a row index."""
    (size,) = (expression(s) for s in tensors_of(node)[0].shape)
    if size == ctx.facts.sequence:
        return (Axis(),)
    if ctx.facts.sequence in size.free_symbols:
        raise NotSeparable("a range over something else than the rows")
    return (None,)


@rule(
    aten.zeros.default, aten.ones.default, aten.full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.new_full.default, aten.scalar_tensor.default, aten.empty.memory_format, aten.eye.default,
)  # fmt: skip
def fill(ctx: RuleContext, node: Node) -> Layout:
    """A constant fill has no rows of its own; one that is sized by the sequence is not placed here."""
    for size in shape_of(node):
        if ctx.facts.sequence in size.free_symbols:
            raise NotSeparable("a fill sized by the sequence")
    return (None,) * ctx.rank(node)
