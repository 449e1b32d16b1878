"""Recurrences along the sequence."""

from __future__ import annotations

from torch.fx import Node

from ..graph.facts import Axis, Layout, Mixing, NotSeparable, Reach
from ..graph.ops.causal_convolution import CHANNELS_APART
from ..graph.ops.recurrence import RECURRENCE, RECURRENCES
from .registry import RuleContext, forbid, rule


@rule(RECURRENCE)
def recurrence(ctx: RuleContext, node: Node) -> Layout:
    """Row i reads rows up to its own, by way of a state; where operands have their rows is known."""
    name, operands = node.args[:2]
    known = RECURRENCES[name]
    if name == CHANNELS_APART and (along := ctx.layout(operands[0]))[2] is None:
        for layout, dims in zip(map(ctx.layout, filter(None, operands)), ([1], [0, 1, 2], [0]), strict=False):
            forbid(layout, dims, "a convolution over channels that hold")
        return along
    for dim, operand in zip(known.dims, operands, strict=True):
        if operand is None:
            continue
        layout = ctx.layout(operand)
        if dim is None:
            forbid(layout, list(range(len(layout))), "a recurrence reads whole what has")
        elif layout != tuple(Axis() if d == dim else None for d in range(len(layout))):
            raise NotSeparable("a recurrence goes along another dim than the sequence")
    ctx.mixes(Mixing(node, columns=(), reach=Reach.CAUSAL))
    return tuple(Axis() if d == known.rows else None for d in range(ctx.rank(node)))
