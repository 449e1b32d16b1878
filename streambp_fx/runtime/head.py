"""A loss head whose loss and gradient come out of one sweep."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..passes.inputs import Extent
from ..passes.ir import tensors_of
from .common import refuse_double_backward
from .streamed import SegmentRunner, Step, Values


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
        step: Step,
        whole: list[Tensor],
        epilogue: Callable[[Tensor], tuple],
        position: int,
        last: frozenset[Node],
        *tensors: Tensor,
    ) -> tuple:
        """
        Args:
            last: streamed inputs that nobody reads after this; their gradient is written over them.
        """
        count = len(runner.segment.rows)
        given = Values(list(tensors[:count]), list(tensors[count:]), whole)
        node = runner.segment.outputs[0]
        output = runner.allocate(node, step, tensors[0], zero=True)
        coefficients, alone = _coefficients(epilogue, output, position)
        ctx.unit = _unit(coefficients) if _is_half(runner) else None
        given.cotangents = [coefficients if ctx.unit is None else coefficients / ctx.unit]
        given.accumulators = runner.accumulators(given.constants)
        inputs = dict(zip(runner.segment.rows, given.rows, strict=True))
        gradients = [
            inputs[n] if n in last and inputs[n].is_contiguous() else runner.allocate(n, step, tensors[0])
            for n in runner.diff_rows
        ]
        extents = runner.extents(step)
        counts = _chunks_that_count(coefficients, runner, step, extents) if alone else itertools.repeat(True)
        for index, (extent, counted) in enumerate(zip(extents, counts, strict=False)):
            if not counted:
                for row, buffer in zip(runner.diff_rows, gradients, strict=True):
                    runner.rows_of(row, buffer, extent, step).zero_()
                continue
            value, *rows = runner.call("loss", extent, step, index, given)
            runner.write(node, output, extent, step, value)
            for row, buffer, gradient in zip(runner.diff_rows, gradients, rows, strict=True):
                runner.write(row, buffer, extent, step, gradient)
            del value, rows
        with torch.no_grad():
            outputs = tuple(epilogue(output))
        ctx.runner, ctx.step, ctx.position, ctx.count = runner, step, position, len(tensors)
        ctx.gradients, ctx.accumulators = gradients, given.accumulators
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k != position))
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
        found.update(zip(runner.diff_constants, runner.finished(ctx.accumulators), strict=True))
        ctx.gradients = None
        inputs = (*runner.segment.rows, *runner.segment.constants)
        return (None,) * 6 + tuple(found.get(n) for n in inputs)


def _is_half(runner: SegmentRunner) -> bool:
    """True if float16 occurs between the loss and the head's input."""
    nodes = (*runner.segment.rows, *runner.segment.nodes)
    return any(t.dtype == torch.float16 for n in nodes for t in tensors_of(n))


def _unit(coefficients: Tensor) -> Tensor:
    """The power of two just above the greatest coefficient.

    NOTE [float16]: the sweep runs before anybody scales the loss, and the coefficients of a mean over many
    tokens are so small that float16 gradients would vanish. So they are divided by this number, which is
    exact, and the finished gradients are multiplied by it together with the scale of the loss.
    """
    greatest = coefficients.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(greatest)))


def _chunks_that_count(
    coefficients: Tensor, runner: SegmentRunner, step: Step, extents: list[Extent]
) -> list[bool]:
    """For each chunk whether a row of it has a part in the loss.

    NOTE [rows without a part in the loss]: labels of a prompt or of padding are ignored, so their rows have
    the coefficient zero. A chunk of such rows is not run: what it adds to the loss and to the gradients is
    zero. (Where a loss of such a row is infinite, and multiplied by zero, eager gives NaN; here it is zero.)
    """
    node = runner.segment.outputs[0]
    counted = [runner.rows_of(node, coefficients, extent, step).any() for extent in extents]
    return torch.stack(counted).tolist() if counted else []


def _coefficients(epilogue: Callable[[Tensor], tuple], zeros: Tensor, position: int) -> tuple[Tensor, bool]:
    """Derivative of the loss with respect to the head's rows, the same wherever it is taken.

    And whether the loss is all that the epilogue makes of the rows.
    """
    with torch.enable_grad():
        rows = zeros.detach().requires_grad_()
        found = epilogue(rows)
        (gradient,) = torch.autograd.grad(found[position], rows)
    return gradient, len(found) == 1
