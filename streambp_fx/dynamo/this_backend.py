"""Which backend Dynamo traces for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends import distributed
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils._pytree import tree_leaves

MARK = "is_streambp_fx"


def modules_of_frame() -> Iterator[nn.Module]:
    """The modules of the frame that Dynamo is compiling: those of its local variables, and within them."""
    context = InstructionTranslator.current_tx()
    for value in tree_leaves(dict(context.f_locals)):
        if isinstance(value, nn.Module):
            yield from value.modules()


def is_cut_at_buckets() -> bool:
    """True if Dynamo hands over pieces of a graph that it has cut where a bucket of DDP's is full.

    Its `optimize_ddp` does so before a backend sees the graph, if the parameters fill more than one.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_fn" and frame.f_globals is vars(distributed):
            return len(frame.f_locals.get("buckets", ())) > 1
        frame = frame.f_back
    return False


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
