"""A loss head whose loss and gradient come out of one sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..passes.inputs import Extent
from ..passes.ir import tensors_of
from .blocks import Block, Step, by_chunk, runs
from .common import refuse_double_backward
from .questions import Questions
from .streamed import SegmentRunner, Values

#: What is asked of the rows of a loss.
CHUNKS, LIMITS = "chunks with rows that count", "rows that count"


@dataclass
class Sweep:
    """What a sweep over the head needs besides the head's own values.

    Attributes:
        epilogue: what is made of the head's rows.
        position: of the loss among what the epilogue returns.
        coefficients: of the loss, in the rows: its derivative, the same wherever it is taken.
        last: streamed inputs that nobody reads after this; their gradient is written over them.
        chunks: how many there are.
        unread: (B,) or (1,), int64: the rows of each sample (all as one, where they are not known to be
            independent) that count, see NOTE [samples that have ended]; None if all do.
        counted: for each chunk, the samples of which a row has a part in the loss; None if all are run.
        limits: with `counted`, what `unread` holds.
    """

    epilogue: Callable[[Tensor], tuple]
    position: int
    coefficients: Tensor
    last: frozenset[Node]
    chunks: int = 0
    unread: Tensor | None = None
    counted: list[list[bool]] | None = None
    limits: list[int] | None = None

    def learn(self, questions: Questions) -> None:
        """Take the answer to what `sweep_of` has asked."""
        flags, self.limits = questions.answer(CHUNKS), questions.answer(LIMITS)
        self.counted = None if flags is None else by_chunk(flags, self.chunks)

    def blocks(self, extents: list[Extent], runs_if: bool = True) -> list[Block]:
        """The blocks that are run, or those that are not."""
        if self.counted is None:
            return [Block(e) for e in extents] if runs_if else []
        return [
            Block(extent, None if part.count == len(own) else part)
            for extent, own in zip(extents, self.counted, strict=True)
            for part in runs(own, runs_if)
        ]


def sweep_of(
    runner: SegmentRunner,
    step: Step,
    epilogue: Callable[[Tensor], tuple],
    position: int,
    last: frozenset[Node],
    like: Tensor,
    questions: Questions,
) -> Sweep:
    """Find the coefficients, before the step, and ask which rows have one.

    NOTE [rows without a part in the loss]: labels of a prompt or of padding are ignored, so their rows have
    the coefficient zero. A chunk of such rows is not run: what it adds to the loss and to the gradients is
    zero. (Where a loss of such a row is infinite, and multiplied by zero, eager gives NaN; here it is zero.)
    """
    node = runner.segment.outputs[0]
    rows = runner.allocate(node, step, like, zero=True)
    coefficients, alone = _coefficients(epilogue, rows, position)
    sweep, chunks = Sweep(epilogue, position, coefficients, last), len(runner.extents(step))
    if alone and chunks:
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
        ctx: Any, runner: SegmentRunner, step: Step, whole: list[Tensor], sweep: Sweep, *tensors: Tensor
    ) -> tuple:
        count = len(runner.segment.rows)
        given = Values(list(tensors[:count]), list(tensors[count:]), whole)
        node, coefficients = runner.segment.outputs[0], sweep.coefficients
        output = runner.allocate(node, step, tensors[0], zero=True)
        ctx.unit = _unit(coefficients) if _is_half(runner) else None
        given.cotangents = [coefficients if ctx.unit is None else coefficients / ctx.unit]
        given.accumulators = runner.accumulators(given.constants)
        inputs = dict(zip(runner.segment.rows, given.rows, strict=True))
        gradients = [
            inputs[n]
            if n in sweep.last and inputs[n].is_contiguous()
            else runner.allocate(n, step, tensors[0])
            for n in runner.diff_rows
        ]
        extents = runner.extents(step)
        for index, block in enumerate(sweep.blocks(extents)):
            values = runner.call("loss", block, step, index, given)
            runner.write_each((node, *runner.diff_rows), (output, *gradients), block, step, values)
            del values
        for block in sweep.blocks(extents, False):
            for row, buffer in zip(runner.diff_rows, gradients, strict=True):
                runner.view(row, buffer, block, step).zero_()
        with torch.no_grad():
            outputs = tuple(sweep.epilogue(output))
        ctx.runner, ctx.step, ctx.position, ctx.count = runner, step, sweep.position, len(tensors)
        ctx.gradients, ctx.accumulators = gradients, given.accumulators
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k != sweep.position))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        refuse_double_backward()
        if ctx.gradients is None:
            raise RuntimeError(
                "this streamed loss was differentiated before, and a second time is not supported, with "
                "retain_graph or without: its gradient is no longer held. Call the model again."
            )
        runner, scale = ctx.runner, cotangents[ctx.position]
        if ctx.unit is not None:
            scale = scale * ctx.unit
        for gradient in (*ctx.gradients, *ctx.accumulators):
            gradient.mul_(scale)
        for gradient in ctx.gradients:
            ctx.step.owned.add(gradient)
        found = dict(zip(runner.diff_rows, ctx.gradients, strict=True))
        found.update(zip(runner.diff_constants, runner.finished(ctx.accumulators, ctx), strict=True))
        ctx.gradients = None
        inputs = (*runner.segment.rows, *runner.segment.constants)
        return (None,) * 4 + tuple(found.get(n) for n in inputs)


def _is_half(runner: SegmentRunner) -> bool:
    """True if float16 occurs between the loss and the head's input."""
    nodes = (*runner.segment.rows, *runner.segment.nodes)
    return any(t.dtype == torch.float16 for n in nodes for t in tensors_of(n))


def _unit(coefficients: Tensor) -> Tensor:
    """The power of two just above the greatest coefficient.

    NOTE [float16]: the sweep runs before anybody scales the loss, and the coefficients of a mean over many
    tokens are so small that float16 gradients would vanish. So they are divided by this number, which is
    exact, and the finished gradients are multiplied by it together with the scale of the loss.
    Not by a smaller one, to leave room for gradients greater than the coefficients: with 2**-8, a quarter of
    the gradient of a word that is no label would be rounding (its probability is some 2e-5 in a vocabulary of
    50,000). Logits that are multiplied by more than 65504 overflow here where eager's mean may not, and the
    self-check then has the model run unstreamed.
    """
    greatest = coefficients.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(greatest)))


def _coefficients(epilogue: Callable[[Tensor], tuple], zeros: Tensor, position: int) -> tuple[Tensor, bool]:
    """Derivative of the loss with respect to the head's rows, the same wherever it is taken.

    And whether the loss is all that the epilogue makes of the rows.
    """
    with torch.enable_grad():
        rows = zeros.detach().requires_grad_()
        found = epilogue(rows)
        (gradient,) = torch.autograd.grad(found[position], rows)
    return gradient, len(found) == 1
