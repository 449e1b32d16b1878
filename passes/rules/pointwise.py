"""Elementwise ops: rows stay rows, operands align from the right as in broadcasting. And complex values."""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from ..graph.facts import ROW_AXIS, Axis, Kind, Layout, NotSeparable, Role, shape_of
from ..graph.op_arguments import arguments
from .registry import RuleContext, forbid, merge_aligned, merge_axis, rule

aten = torch.ops.aten


def align(ctx: RuleContext, node: Node, inputs: list[Node]) -> Layout:
    """Layout of a broadcast of `inputs`. A value without a gradient takes the axes of its partners.

    NOTE [axes of values without gradient]: broadcasting demands equal sizes or 1, so a dim of a whole
    or square value that meets a sequence axis is either 1 or that same axis. Nothing is guessed: a whole
    value has rows of its own only where no partner has an axis. So a mask of padding, with a row for each
    token, has columns beside scores.

    Raises:
        NotSeparable: it is not known where the sequence is in the operands.
    """
    rank = ctx.rank(node)
    result: list[Axis | None] = [None] * rank
    unproved: list[Node] = []
    whole: list[Node] = []
    for operand in inputs:
        ctx.seen.add(operand)
        kind = ctx.facts.kinds.get(operand)
        layout = ctx.facts.layouts.get(operand)
        if kind is Kind.SQUARE and ctx.places:
            merge_aligned(result, ctx.layout(operand), shape_of(operand))
        elif kind is Kind.SQUARE or layout is None:
            if kind is Kind.STREAM:
                raise NotSeparable(f"the sequence axis of operand {operand.name} is unknown")
            unproved.append(operand)
        elif kind is Kind.WHOLE:
            whole.append(operand)
        else:
            merge_aligned(result, layout, shape_of(operand))
    if len(unproved) == len(inputs) > 0:
        raise NotSeparable("no operand has a known sequence axis")
    for operand in whole:
        _take_rows(ctx, operand, result)
    for operand in unproved:
        _check_covered(ctx, operand, result, rank)
    return tuple(result)


def _take_rows(ctx: RuleContext, operand: Node, result: list[Axis | None]) -> None:
    """Merge the axes of a whole value: a simple one gives way to that of its partners."""
    layout, shape = ctx.facts.layouts[operand], shape_of(operand)
    assert layout is not None
    for offset in range(1, len(layout) + 1):
        axis, known = layout[-offset], result[-offset]
        if axis is None or shape[-offset] == 1:
            continue
        gives_way = known is not None and known.role is Role.COLUMN and axis == ROW_AXIS and known.simple
        result[-offset] = known if gives_way else merge_axis(known, axis)


def _check_covered(ctx: RuleContext, operand: Node, result: list[Axis | None], rank: int) -> None:
    sequence = ctx.facts.sequence
    for offset, size in enumerate(reversed(shape_of(operand))):
        axis = result[rank - 1 - offset]
        if sequence in size.free_symbols and axis is None:
            raise NotSeparable(f"operand {operand.name} carries the sequence where the others do not")
        if sequence in size.free_symbols and axis is not None and axis.order is not None:
            raise NotSeparable(f"operand {operand.name} is not known to be in the order of sorted rows")


# Besides those that PyTorch tags.
POINTWISE = [
    "rsub.Tensor", "floor_divide.default", "hardswish.default", "log_sigmoid.default", "where.ScalarOther",
    "where.ScalarSelf", "where.Scalar", "masked_fill.Tensor", "__and__.Tensor", "__or__.Tensor",
    "detach.default", "contiguous.default", "alias.default", "to.dtype", "to.device", "to.dtype_layout",
    "to.other", "_to_copy.default", "type_as.default", "zeros_like.default", "ones_like.default",
    "full_like.default", "lift_fresh_copy.default", "lift_fresh.default", "dropout.default",
    "polar.default", "complex.default", "_conj.default", "resolve_conj.default", "real.default",
    "imag.default",
]  # fmt: skip


# Casts whose second operand only lends its dtype.
LIKE_ANOTHER = (aten.type_as.default, aten.to.other)


@functools.cache
def pointwise_ops() -> tuple[torch._ops.OpOverload, ...]:
    """The overloads of the list above that this version of torch has, and those that it tags as pointwise."""
    named = [getattr(getattr(aten, n.split(".")[0], None), n.split(".")[1], None) for n in POINTWISE]
    return tuple(sorted({op for op in (*named, *tagged_ops()) if op is not None}, key=str))


def tagged_ops() -> list[torch._ops.OpOverload]:
    """The ops that PyTorch tags as pointwise and that make one tensor of tensors (`equal` makes a bool).

    Random ones are left out, and special functions, of which some cannot be traced with symbolic sizes.
    """
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and not packet.startswith("special_"):
            op = getattr(getattr(aten, packet), overload or "default")
            if torch.Tag.pointwise in op.tags and _makes_a_tensor(op._schema):
                found.append(op)
    return found


def _makes_a_tensor(schema: torch.FunctionSchema) -> bool:
    if schema.is_mutable or [str(r.type) for r in schema.returns] != ["Tensor"]:
        return False
    types = [str(a.type) for a in schema.arguments]
    return "Tensor" in types and not any("Generator" in t for t in types)


# Elementwise losses that take a reduction, with the position of that argument.
ELEMENTWISE_LOSSES = {
    aten.kl_div.default: 2, aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2, aten.soft_margin_loss.default: 2, aten.poisson_nll_loss.default: 5,
    aten.binary_cross_entropy.default: 3, aten.binary_cross_entropy_with_logits.default: 4,
}  # fmt: skip


@rule(*ELEMENTWISE_LOSSES)
def elementwise_loss(ctx: RuleContext, node: Node) -> Layout:
    """Without a reduction (the normalize pass sees to that) one loss an element."""
    if arguments(node)["reduction"] != 0:
        raise NotSeparable("a loss summed over the sequence axis")
    return align(ctx, node, _tensors(node))


@rule(*pointwise_ops())
def pointwise(ctx: RuleContext, node: Node) -> Layout:
    """Element by element: rows stay rows, and operands align from the right."""
    inputs = _tensors(node)
    if node.target in LIKE_ANOTHER:
        ctx.ignores(arguments(node)["other"])
        inputs = [arguments(node)["self"]]
    return align(ctx, node, inputs)


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


# ---- complex values: pairs of numbers as one, and back


@rule(aten.view_as_complex.default)
def view_as_complex(ctx: RuleContext, node: Node) -> Layout:
    """The last dim, of two numbers, becomes one complex number; the others keep what they carry."""
    layout = ctx.layout(arguments(node)["self"])
    forbid(layout, [len(layout) - 1], "a complex number across")
    return layout[:-1]


@rule(aten.view_as_real.default)
def view_as_real(ctx: RuleContext, node: Node) -> Layout:
    """A complex number becomes a last dim of two; the others keep what they carry."""
    return (*ctx.layout(arguments(node)["self"]), None)
