"""The autograd function of a streamed segment."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ..passes.ir import tensors_of
from .blocks import Step
from .common import as_it_is, refuse_double_backward
from .streamed import SegmentRunner, Values


class StreamedSegment(torch.autograd.Function):
    """Autograd function of one streamed segment: keeps its inputs, and what the policy adds to them."""

    @staticmethod
    def forward(
        ctx: Any, runner: SegmentRunner, step: Step, whole: list[Tensor], unread: bool, *tensors: Tensor
    ) -> tuple:
        """
        Args:
            unread: a second forward for the sake of what is saved; the outputs need not hold anything.
        """
        count = len(runner.segment.rows)
        values = Values(list(tensors[:count]), list(tensors[count:]), whole)
        ctx.runner, ctx.step, ctx.count, ctx.inputs = runner, step, count, len(tensors)
        outputs = tuple(runner.forward(step, values, tensors[0], unread))
        ctx.whole, ctx.chunks = len(whole), len(values.kept)
        read = (as_it_is(t) for t in (*tensors, *whole))
        ctx.save_for_backward(*read, *itertools.chain(*values.kept))
        if runner.needs_grad:
            runner.prepare_backward(step)
        ctx.set_materialize_grads(False)
        frozen = [
            o
            for n, o in zip(runner.segment.outputs, outputs, strict=True)
            if n not in runner.facts.needs_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        refuse_double_backward()
        with torch._C._DisableAutocast():
            return StreamedSegment._gradients(ctx, gradients)

    @staticmethod
    def _gradients(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple:
        runner, step = ctx.runner, ctx.step
        tensors = iter(ctx.saved_tensors)
        saved, whole = (list(itertools.islice(tensors, n)) for n in (ctx.inputs, ctx.whole))
        values = Values(saved[: ctx.count], saved[ctx.count :], whole)
        kept = list(tensors)
        if kept:
            each = len(kept) // ctx.chunks
            values.kept = [kept[k * each : (k + 1) * each] for k in range(ctx.chunks)]
        by_node = dict(zip(runner.segment.outputs, gradients, strict=True))
        given = [by_node[n] for n in runner.diff_outputs]
        if all(g is None for g in given):
            return (None,) * (4 + len(saved))
        reuse = _can_reuse(runner, step, given)
        values.cotangents = [
            runner.allocate(n, step, saved[0], zero=True) if g is None else g
            for n, g in zip(runner.diff_outputs, given, strict=True)
        ]
        values.accumulators = runner.accumulators(values.constants)
        rows = runner.backward(step, values, saved[0], reuse)
        for gradient in rows:
            step.owned.add(gradient)
        found = dict(zip(runner.diff_rows, rows, strict=True))
        found.update(zip(runner.diff_constants, runner.finished(values.accumulators, ctx), strict=True))
        if any(g is None for g in given):
            reached = runner.reached_from(n for n, g in by_node.items() if g is not None)
            found = {n: g for n, g in found.items() if n in reached}
        inputs = (*runner.segment.rows, *runner.segment.constants)
        return (None, None, None, None, *(found.get(n) for n in inputs))


def _can_reuse(runner: SegmentRunner, step: Step, cotangents: list[Tensor | None]) -> bool:
    """True if the gradient of the one streamed input may overwrite that of the one output."""
    if not runner.can_overwrite() or cotangents[0] is None:
        return False
    gradient = cotangents[0]
    same = tensors_of(runner.diff_rows[0])[0].dtype == gradient.dtype and gradient.is_contiguous()
    return same and step.owned.take(gradient)
