"""A loss head whose loss and gradient come out of one sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...passes.s4_trace.program_inputs import Extent
from ...passes.step.instructions import BufferKind, Over
from ...passes.step.procedure import Procedure
from .failures import refuse_other_backwards
from .interpreter import Frame, run
from .questions_to_data import Questions
from .segment_function import frame_of, held_by_autograd
from .segment_runner import SegmentRunner
from .step_blocks import RowBlock, StepData, by_chunk, runs

#: What is asked of the rows of a loss.
CHUNKS, LIMITS = "chunks with rows that count", "rows that count"


@dataclass
class Sweep:
    """What a sweep over the head needs besides the head's own values.

    Attributes:
        epilogue: what is made of the head's rows.
        position: of the loss among what the epilogue returns.
        coefficients: of the loss, in the rows: its derivative, the same wherever it is taken.
        chunks: how many there are.
        unread: (B,) or (1,), int64: the rows of each sample (all as one, where they are not known to be
            independent) that count, see NOTE [samples that have ended]; None if all do.
        counted: for each chunk, the samples of which a row has a part in the loss; None if all are run.
        limits: with `counted`, what `unread` holds.
    """

    epilogue: Callable[[Tensor], tuple]
    position: int
    coefficients: Tensor
    chunks: int = 0
    unread: Tensor | None = None
    counted: list[list[bool]] | None = None
    limits: list[int] | None = None

    def learn(self, questions: Questions) -> None:
        """Take the answer to what `sweep_of` has asked."""
        flags, self.limits = questions.answer(CHUNKS), questions.answer(LIMITS)
        self.counted = None if flags is None else by_chunk(flags, self.chunks)

    def blocks(self, extents: list[Extent], runs_if: bool = True) -> list[RowBlock]:
        """The blocks that are run, or those that are not."""
        if self.counted is None:
            return [RowBlock(e) for e in extents] if runs_if else []
        return [
            RowBlock(extent, None if part.count == len(own) else part)
            for extent, own in zip(extents, self.counted, strict=True)
            for part in runs(own, runs_if)
        ]


def sweep_of(
    runner: SegmentRunner,
    step: StepData,
    epilogue: Callable[[Tensor], tuple],
    position: int,
    like: Tensor,
    questions: Questions,
) -> Sweep:
    """Find the coefficients, before the step, and ask which rows have one.

    NOTE [rows without a part in the loss]: labels of a prompt or of padding are ignored, so their rows have
    the coefficient zero. A chunk of such rows is not run: what it adds to the loss and to the gradients is
    zero. (Where a loss of such a row is infinite, and multiplied by zero, eager gives NaN; here it is zero.)

    Args:
        epilogue: what is made of the head's rows; it returns the outputs, and the loss among them.
        position: of the loss, a scalar, among those.
        last: streamed inputs that nobody reads after the sweep.
        like: a tensor on the device of the head, of any shape and dtype.
        questions: where it is asked which rows have a coefficient.
    """
    node = runner.segment.outputs[0]
    rows = runner.allocate(node, step, like, zero=True)
    coefficients, alone = _coefficients(epilogue, rows, position)
    sweep, chunks = Sweep(epilogue, position, coefficients), len(runner.extents(step))
    if alone and chunks and step.own is None:
        flags, lengths = runner.counts(coefficients, step)
        more = max(1, runner.segment.removed)  # those of the sequence that the head has not may come first
        sweep.unread = torch.where(lengths > 0, lengths + more, lengths)
        sweep.chunks = chunks
        questions.ask(CHUNKS, flags)
        questions.ask(LIMITS, sweep.unread)
    return sweep


class OneSweepHead(torch.autograd.Function):
    """Head and epilogue together, for an epilogue that is linear in the head's rows.

    The cotangents of the rows are the epilogue's coefficients, found by differentiating it at zero. The
    forward computes the rows and, in the same sweep, all gradients for a unit cotangent of the loss; the
    backward scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        runner: SegmentRunner,
        step: StepData,
        whole: list[Tensor],
        sweep: Sweep,
        procedures: tuple[Procedure, Procedure],
        *tensors: Tensor,
    ) -> tuple:
        """
        Args:
            procedures: "loss" and "scaling".
        """
        frame = frame_of(runner, step, tensors, whole)
        extents = runner.extents(step)
        frame.blocks = lambda over, size: sweep.blocks(extents, over is not Over.NOT_COUNTED)
        (cotangent,) = runner.programs.buffers(BufferKind.COTANGENT)
        frame.tensors[cotangent] = _own(sweep.coefficients, runner, step).contiguous()
        loss, ctx.procedure = procedures
        output, *made = run(loss, frame)
        with torch.no_grad():
            lies = None if step.own is None else runner.lies(runner.segment.outputs[0], step)
            outputs = tuple(sweep.epilogue(output if lies is None else lies.gather(output)))
        ctx.position = sweep.position
        finished = dict(zip(ctx.procedure.parameters, made, strict=True))
        like = (made or [output])[0]
        ctx.frame = Frame(runner, step, finished, like, lambda over, size: [], unit=frame.unit)
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k != sweep.position))
        return outputs

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        """Scale the gradients that forward has made by the gradient of the loss.

        Raises:
            RuntimeError: the loss was differentiated before; its gradients are no longer held.
        """
        refuse_other_backwards(cotangents)
        frame, ctx.frame = ctx.frame, None
        if frame is None:
            raise RuntimeError(
                "this streamed loss was differentiated before, and a second time is not supported, with "
                "retain_graph or without: its gradient is no longer held. Call the model again."
            )
        frame.scale, frame.function, runner = cotangents[ctx.position], ctx, frame.runner
        made = run(ctx.procedure, frame)
        found = dict(zip((runner.twins[b.node] for b in ctx.procedure.results), made, strict=True))
        for gradient in held_by_autograd(runner, frame.step, found):
            frame.step.owned.add(gradient)
        inputs = (*runner.segment.rows, *runner.segment.constants)
        return (None,) * 5 + tuple(found.get(n) for n in inputs)


def _own(value: Tensor, runner: SegmentRunner, step: StepData) -> Tensor:
    """Of the rows of the head, those of this device."""
    return value if step.own is None else runner.lies(runner.segment.outputs[0], step).slice(value)


def _coefficients(epilogue: Callable[[Tensor], tuple], zeros: Tensor, position: int) -> tuple[Tensor, bool]:
    """Derivative of the loss with respect to the head's rows, the same wherever it is taken.

    And whether the loss is all that the epilogue makes of the rows.
    """
    with torch.enable_grad():
        rows = zeros.detach().requires_grad_()
        found = epilogue(rows)
        (gradient,) = torch.autograd.grad(found[position], rows)
    return gradient, len(found) == 1
