"""Products with quantised weights: ops of other packages, registered by name, as they may not be installed.

Each contracts the last dim of its first operand with a weight, and scales what comes of it by numbers that
belong to the weight alone. An op that also quantises its rows is none of them, unless each row by itself.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..ir import Layout, NotSeparable, operands
from . import RuleContext, forbid, rule, rule_of

# Packages whose ops have tags that say whether they draw random numbers.
TAGGED = ("aten", "prims", "streambp_fx")
# Ops of others that are functions of their operands. One that is missing is taken to draw random numbers.
DETERMINISTIC = frozenset(
    f"bitsandbytes::{name}"
    for name in (
        "dequantize_4bit", "quantize_4bit", "dequantize_blockwise", "quantize_blockwise", "gemv_4bit",
        "int8_linear_matmul", "int8_mm_dequant", "int8_scaled_mm", "int8_vectorwise_quant",
        "int8_vectorwise_dequant", "int8_double_quant",
    )
)  # fmt: skip


def is_deterministic(op: OpOverload) -> bool:
    """True if an op is known to draw no random numbers, whatever its arguments."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return op.namespace in TAGGED or rule_of(op) is not None or op._schema.name in DETERMINISTIC


@rule("bitsandbytes::gemm_4bit")
def quantised_linear(ctx: RuleContext, node: Node) -> Layout:
    """Rows times a matrix that is decoded on the way: rows stay rows."""
    x = node.args[0]
    layout = ctx.layout(x)
    forbid(layout, [len(layout) - 1], "a linear layer contracts")
    if any(ctx.facts.carries(n) for n in operands(node) if n is not x):
        raise NotSeparable("the weight of a linear layer carries the sequence")
    return (*layout[:-1], None)
