"""Complex values: pairs of numbers as one, and back."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.facts import Layout
from ..graph.op_arguments import arguments
from .registry import RuleContext, forbid, rule

aten = torch.ops.aten


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
