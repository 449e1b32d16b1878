"""Which ops are known to draw no random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

# Packages whose ops have tags that say whether they draw random numbers.
TAGGED = ("aten", "prim", "prims", "streambp_fx")
# Ops of others that are functions of their operands, by name. One that is missing is taken to draw random
# numbers. Ops that have a rule are added by it.
DETERMINISTIC: set[Any] = {
    f"bitsandbytes::{name}"
    for name in (
        "dequantize_4bit", "quantize_4bit", "dequantize_blockwise", "quantize_blockwise", "gemv_4bit",
        "int8_linear_matmul", "int8_mm_dequant", "int8_scaled_mm", "int8_vectorwise_quant",
        "int8_vectorwise_dequant", "int8_double_quant",
    )
}  # fmt: skip


def is_deterministic(op: OpOverload) -> bool:
    """True if an op is known to draw no random numbers, whatever its arguments."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return op.namespace in TAGGED or op in DETERMINISTIC or op._schema.name in DETERMINISTIC
