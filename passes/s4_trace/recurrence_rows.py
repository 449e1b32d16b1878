"""A recurrence on the rows of a chunk, with the state that goes from chunk to chunk.

Chunks are differentiated from the last to the first, so when a chunk's turn comes the gradient of the state
that it leaves is complete.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph.ops.recurrence import RECURRENCE_STEP, RECURRENCE_VJP


class RecurrenceRows(torch.autograd.Function):
    """The rows that a recurrence makes of a chunk's."""

    @staticmethod
    def forward(
        known: tuple,
        before: Tensor,
        after: Tensor,
        grad_before: Tensor,
        grad_after: Tensor,
        *operands: Tensor | None,
    ) -> Tensor:
        """The rows; the state after the chunk is written.

        Args:
            known: name, settings and autocast's dtype, as the op takes them.
            before, after: the states before the chunk and after it, of the same shape.
            grad_before, grad_after: buffers of their gradients.
            operands: of the op, each with the chunk's rows or with none.
        """
        name, settings, cast = known
        made, last = RECURRENCE_STEP(name, operands, settings, cast, before)
        after.copy_(last)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Save the operands and the state before; keep the buffers of gradients."""
        ctx.known, before, _, ctx.grad_before, ctx.grad_after, *operands = inputs
        ctx.save_for_backward(before, *operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradients of the operands; that of the state before is written."""
        before, *operands = ctx.saved_tensors
        name, settings, cast = ctx.known
        wanted = list(ctx.needs_input_grad[5:])
        last = ctx.grad_after.to(before.dtype)
        *found, first = RECURRENCE_VJP(name, operands, settings, cast, before, gradient, last, wanted)
        ctx.grad_before.add_(first)
        rest = iter(found)
        return (*(None,) * 5, *(next(rest) if w else None for w in wanted))
