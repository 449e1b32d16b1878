"""independent_samples: which dims of a segment's values hold the samples, where the samples are proved
independent.

A segment may run for a part of the batch if every value of it, for some of the samples, is what those
samples are in the value for all of them. It is proved with the op rules (`rules/`), asked about the batch
size instead of the sequence length, and of everything the segment's program computes: masks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..graph.autograd_functions import CustomFunction
from ..graph.facts import (
    Axis,
    Facts,
    Kind,
    Layout,
    NotSeparable,
    Role,
    Segment,
    operands,
    shape_of,
    tensors_of,
)
from ..graph.op_arguments import sdpa_arguments
from ..graph.ops.recurrence import RECURRENCE
from ..graph.sources import source_line
from ..graph.subgraph import made_of
from ..rules import Rule, RuleContext, forbid, merge_aligned, rule_for
from ..rules.asking import ask
from ..rules.size_operands import check_sizes, mentions
from .axes import custom_layout

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """Where the samples are in a value: a dim, and how many of its entries one sample has."""

    dim: int
    inner: sympy.Expr

    def narrow(self, value: Tensor, first: int, count: int, inner: int) -> Tensor:
        """The entries of samples [first, first + count) as a view; the shape changes in `self.dim` alone.

        Args:
            inner: entries of that dim that one sample has.
        """
        return value.narrow(self.dim, first * inner, count * inner)


@dataclass(frozen=True)
class Samples:
    """The samples of a segment.

    Attributes:
        size: the symbol of the batch size.
        places: where they are, of each value that goes into the segment's program or comes out of it and has
            them.
    """

    size: sympy.Symbol
    places: dict[Node, Place]


def batch_size(facts: Facts) -> sympy.Symbol | None:
    """The symbol of the batch size: that of the first dim of what is streamed."""
    streamed = (n for s in facts.segments if s.chunked for n in s.rows)
    found = {shape_of(n)[0] for n in streamed if shape_of(n)}
    symbols = {s for s in found if isinstance(s, sympy.Symbol) and s != facts.sequence}
    return symbols.pop() if len(symbols) == 1 else None


def batch(facts: Facts, segment: Segment, size: sympy.Symbol, states: Sequence[Node] = ()) -> Samples | str:
    """Where the samples are in a segment, or the reason why they are not known to be independent.

    Args:
        facts: facts of the graph after the segment pass.
        segment: one that is chunked.
        size: the symbol of the batch size.
        states: values of the segment's program that are kept for later chunks.
    """
    together = next((n for n in states if n.target is RECURRENCE), None)
    if together is not None:
        return f"{_op(together)}: its state is that of all samples ({source_line(together)})"
    asked = Facts(facts.module, size, facts.parameters, facts.differentiable, values=facts.values)
    asked.needs_grad = facts.needs_grad
    context = RuleContext(asked)
    given = {*segment.rows, *segment.constants, *segment.whole}
    for node in _computed(facts, segment, given):
        streamed = facts.kinds.get(node) is Kind.STREAM
        asked.kinds[node] = Kind.SIZE if not tensors_of(node) else Kind.STREAM if streamed else Kind.WHOLE
        if not tensors_of(node):
            continue
        try:
            asked.layouts[node] = _checked(_layout(context, node, node in given))
        except NotSeparable as refusal:
            return f"{_op(node)}: {refusal} ({source_line(node)})"
        if asked.mixings or asked.slices:
            return f"{_op(node)}: it reads other samples ({source_line(node)})"
    try:
        wanted = [*segment.rows, *segment.constants, *segment.whole, *states, *segment.outputs]
        if any(asked.layouts[n] != _seeded(asked, n) for n in segment.outputs):
            return "what comes out of it does not hold the samples as what goes into the next segment does"
        return Samples(size, {n: p for n in wanted if (p := _place(asked.layouts.get(n))) is not None})
    except NotSeparable as refusal:
        return str(refusal)


def _computed(facts: Facts, segment: Segment, given: set[Node]) -> list[Node]:
    """What the program of a segment computes, and what it is given, in graph order."""
    masks = [n for m in segment.mixings if m.mask is not None for n in m.mask.nodes]
    found = made_of([*given, *segment.nodes, *masks], given.__contains__)
    return [n for n in facts.nodes if n in found]


def _op(node: Node) -> str:
    return node.target.__name__ if isinstance(node.target, CustomFunction) else str(node.target)


def _checked(layout: Layout) -> Layout:
    for axis in layout:
        if axis is not None and (axis.role is not Role.ROW or axis.removed):
            raise NotSeparable("it reads other samples")
    return layout


def _place(layout: Layout | None) -> Place | None:
    found = [(d, a) for d, a in enumerate(layout or ()) if a is not None]
    if not found:
        return None
    ((dim, axis),) = found if len(found) == 1 else [(0, None)]
    if axis is None or axis.outer != 1:
        raise NotSeparable("the samples do not lie one after the other")
    return Place(dim, axis.inner)


# ---- rules that differ from those of the sequence

REPEATS = {aten.expand.default, aten.broadcast_to.default}
FILLS = {
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.zeros.default,
    aten.ones.default, aten.full.default,
}  # fmt: skip


def _layout(context: RuleContext, node: Node, given: bool) -> Layout:
    facts = context.facts
    if given or node.op in ("placeholder", "get_attr"):
        return _seeded(facts, node)
    near = (node, *operands(node))
    if not any(facts.carries(n) or mentions(facts, n) or n in facts.local for n in near):
        return (None,) * tensors_of(node)[0].dim()
    if not isinstance(node.target, CustomFunction):
        check_sizes(facts, node, "batch size")
    rule = _rule(facts, node)
    if rule is None:
        raise NotSeparable("there is no rule for it")
    return ask(rule, context, node)


def _rule(facts: Facts, node: Node) -> Rule | None:
    if any(n in facts.local for n in operands(node)):
        return rule_for(facts, node)
    if isinstance(node.target, CustomFunction):
        return custom_layout
    if node.target in FILLS | REPEATS:
        return _repeated
    if node.target is aten.scaled_dot_product_attention.default:
        return _attention
    return rule_for(facts, node)


def _seeded(facts: Facts, node: Node) -> Layout:
    """Samples of what the program is given: the dim that has the batch size, or a multiple of it."""
    found: list[Axis | None] = []
    for size in shape_of(node):
        inner = sympy.cancel(size / facts.sequence)
        carries = facts.sequence in size.free_symbols
        if carries and facts.sequence in inner.free_symbols:
            raise NotSeparable("a size that is made of the batch size")
        found.append(Axis(inner=inner) if carries else None)
    if sum(axis is not None for axis in found) > 1:
        raise NotSeparable("two of its dims have the batch size")
    return tuple(found)


def _repeated(context: RuleContext, node: Node) -> Layout:
    """The same for every sample, or what there is of each."""
    size, sizes = context.facts.sequence, shape_of(node)
    layout: Layout = () if node.target in FILLS else context.layout(node.args[0])
    layout = (None,) * (len(sizes) - len(layout)) + layout
    result = tuple(Axis() if s == size else a for a, s in zip(layout, sizes, strict=True))
    if any(a is None and size in s.free_symbols for a, s in zip(result, sizes, strict=True)):
        raise NotSeparable("a size that is made of the batch size")
    if sum(a is not None for a in result) > 1:
        raise NotSeparable("two of its dims have the batch size")
    return result


def _attention(context: RuleContext, node: Node) -> Layout:
    """Each sample attends to itself."""
    call = sdpa_arguments(node)
    result: list[Axis | None] = [None] * context.rank(node)
    for name in ("query", "key", "value", "attn_mask"):
        operand = call[name]
        if not isinstance(operand, Node):
            continue
        layout = context.layout(operand)
        forbid(layout, [len(layout) - 2, len(layout) - 1], "an attention along")
        merge_aligned(result, layout, shape_of(operand))
    return tuple(result)
