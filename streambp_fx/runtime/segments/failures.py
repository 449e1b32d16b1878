"""What a user is told of a pass that failed, and of a backward that a streamed step has none of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import CompileError
from ...passes.graph.facts import PassError
from ...passes.graph.sources import source_line
from ...passes.s4_trace.vjp import FixedLength
from .dispatch_modes import refuse_modes_in_backward

REPORT = "Please report this, with this text and the code of the model."

TO_EAGER = 'To train unstreamed, leave the option on_error at "eager", or call streambp_fx.restore(model).'
FALL_BACK = f"{TO_EAGER} {REPORT}"


def compile_error(error: PassError) -> CompileError:
    """What a user is told of a pass that failed: the pass, the op, its source line, what to do."""
    line = f" The line of the model is {source_line(error.node)}." if error.node is not None else ""
    return CompileError(f"{error}.{line} {TO_EAGER if isinstance(error.cause, FixedLength) else FALL_BACK}")


def refuse_other_backwards(gradients: Iterable[Tensor | None]) -> None:
    """Raise in a backward that is differentiated, in one of several gradients, and in a dispatch mode.

    Args:
        gradients: that it is given, of any shape and dtype.

    Raises:
        RuntimeError: says which, and what to do.
    """
    refuse_modes_in_backward()
    functorch = torch._C._functorch
    if any(
        g is not None and (functorch.is_functorch_wrapped_tensor(g) or functorch.is_legacy_batchedtensor(g))
        for g in gradients
    ):
        raise RuntimeError(
            "a batch of gradients at once (is_grads_batched, torch.vmap over a backward) is not supported by "
            "streambp_fx: the streamed backward adds in place. Ask for them one after the other, or call "
            "streambp_fx.restore(model)."
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "double backward is not supported by streambp_fx: the streamed backward keeps no graph. "
            "Call streambp_fx.restore(model) for a model whose gradient must be differentiated."
        )
