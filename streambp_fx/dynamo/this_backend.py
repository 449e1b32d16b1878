"""Which backend Dynamo traces for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils._pytree import tree_leaves

MARK = "is_streambp_fx"


def modules_of_frame() -> Iterator[nn.Module]:
    """The modules of the frame that Dynamo is compiling: those of its local variables, and within them."""
    context = InstructionTranslator.current_tx()
    for value in tree_leaves(dict(context.f_locals)):
        if isinstance(value, nn.Module):
            yield from value.modules()


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
