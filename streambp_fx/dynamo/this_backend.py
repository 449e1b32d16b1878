"""Which backend Dynamo traces for."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

MARK = "is_streambp_fx"


@torch._dynamo.assume_constant_result
def is_traced_for_us() -> bool:
    """True while Dynamo traces for this project's backend, by whatever door."""
    seen: set[int] = set()
    pending: list[Any] = [InstructionTranslator.current_tx().output.compiler_fn]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if getattr(found, MARK, False):
            return True
        names = ("compiler_fn", "func", "__wrapped__", "_torchdynamo_orig_backend", "fn", "__self__")
        pending += [getattr(found, n, None) for n in names]
    return False
