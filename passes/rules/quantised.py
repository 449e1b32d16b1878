"""Products with quantised weights: ops of other packages, registered by name, as they may not be installed.

Each contracts the last dim of its first operand with a weight, and scales what comes of it by numbers that
belong to the weight alone. An op that also quantises its rows is none of them, unless each row by itself.
"""

from __future__ import annotations

from torch.fx import Node

from ..graph.facts import Layout, NotSeparable, operands
from .registry import RuleContext, forbid, rule


@rule("bitsandbytes::gemm_4bit")
def quantised_linear(ctx: RuleContext, node: Node) -> Layout:
    """Rows times a matrix that is decoded on the way: rows stay rows."""
    x = node.args[0]
    layout = ctx.layout(x)
    forbid(layout, [len(layout) - 1], "a linear layer contracts")
    if any(ctx.facts.carries(n) for n in operands(node) if n is not x):
        raise NotSeparable("the weight of a linear layer carries the sequence")
    return (*layout[:-1], None)
