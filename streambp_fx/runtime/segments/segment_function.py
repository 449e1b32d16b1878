"""The autograd function of a streamed segment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.step.instructions import Buffer, BufferKind
from ...passes.step.procedure import Procedure
from . import rows_elsewhere
from .failures import refuse_other_backwards
from .interpreter import Frame, prepare, run
from .owned_buffers import as_it_is
from .segment_runner import SegmentRunner
from .step_blocks import StepData

Procedures = tuple[Procedure | None, Procedure | None]


class StreamedSegment(torch.autograd.Function):
    """Autograd function of one streamed segment: keeps its inputs, and what the policy adds to them."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: SegmentRunner,
        step: StepData,
        whole: list[Tensor],
        procedures: Procedures,
        *tensors: Tensor,
    ) -> tuple:
        """Outputs of the segment, for all rows.

        Args:
            procedures: forward and backward. Without a forward it is run for the sake of what is saved, and
                the outputs need not hold anything; without a backward no gradient comes to them.
        """
        frame, (forward, backward) = frame_of(runner, step, tensors, whole), procedures
        if forward is None:
            outputs = tuple(runner.unwritten(n, step, tensors[0]) for n in runner.segment.outputs)
        else:
            outputs = tuple(run(forward, frame))
        outputs, states = outputs[: len(runner.segment.outputs)], outputs[len(runner.segment.outputs) :]
        ctx.runner, ctx.step, ctx.procedure = runner, step, backward
        ctx.inputs, ctx.whole, ctx.states = len(tensors), len(whole), len(states)
        ctx.kept = [len(own) for own in frame.kept.values()]
        read = (as_it_is(t) for t in (*tensors, *whole))
        ctx.save_for_backward(*read, *states, *itertools.chain(*frame.kept.values()))
        if backward is not None:  # what is wrong with it is said in the forward: nothing is half done
            prepare(backward, frame)
        ctx.set_materialize_grads(False)
        frozen = [
            o
            for n, o in zip(runner.segment.outputs, outputs, strict=True)
            if n not in runner.facts.needs_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Gradients of the arguments of `forward`; None for those that no gradient reaches."""
        refuse_other_backwards(gradients)
        with torch._C._DisableAutocast():
            return StreamedSegment._gradients(ctx, gradients)

    @staticmethod
    def _gradients(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple:
        runner, step = ctx.runner, ctx.step
        tensors, counts = iter(ctx.saved_tensors), (ctx.inputs, ctx.whole, ctx.states)
        saved, whole, states = (list(itertools.islice(tensors, n)) for n in counts)
        by_node = dict(zip(runner.segment.outputs, gradients, strict=True))
        given = [by_node[n] for n in runner.diff_outputs]
        if all(g is None for g in given):
            return (None,) * (4 + len(saved))
        frame = frame_of(runner, step, saved, whole)
        frame.function = ctx
        for buffer, gradient in zip(runner.programs.buffers(BufferKind.COTANGENT), given, strict=True):
            frame.tensors[buffer] = (
                zeros_like_output(buffer, frame) if gradient is None else gradient.contiguous()
            )
        frame.kept = {k: list(itertools.islice(tensors, n)) for k, n in enumerate(ctx.kept)}
        procedure = ctx.procedure
        kept = (b for b in procedure.parameters if b.kind is BufferKind.STATE)
        frame.tensors.update(zip(kept, states, strict=True))
        made = run(procedure, frame)
        own = [runner.twins[b.node] for b in procedure.results]
        found = dict(zip(own, made, strict=True))
        for gradient in held_by_autograd(runner, step, found):
            step.owned.add(gradient)
        if any(g is None for g in given):
            reached = runner.reached_from(n for n, g in by_node.items() if g is not None)
            found = {n: g for n, g in found.items() if n in reached}
        inputs = (*runner.segment.rows, *runner.segment.constants)
        return (None, None, None, None, *(found.get(n) for n in inputs))


def held_by_autograd(runner: SegmentRunner, step: StepData, found: Mapping[Node, Tensor]) -> list[Tensor]:
    """Gradients that nobody holds but autograd, which hands them on.

    Those of rows go to the segment before; those of constants go to a sum over devices, if there are several,
    and else may become the `grad` of a parameter.

    Args:
        found: by input of the segment, in any shapes and dtypes.
    """
    rows = set(runner.diff_rows)
    return [g for n, g in found.items() if n in rows or step.own is not None]


def frame_of(
    runner: SegmentRunner, step: StepData, tensors: Sequence[Tensor], whole: Sequence[Tensor]
) -> Frame:
    """What a procedure begins with.

    Args:
        tensors: streamed inputs, then constants, in the shapes and dtypes that the graph gives them.
        whole: values without a gradient, likewise.
    """
    kinds = (BufferKind.ROWS, BufferKind.CONSTANT, BufferKind.WHOLE)
    buffers = (b for kind in kinds for b in runner.programs.buffers(kind))
    held = dict(zip(buffers, (*tensors, *whole), strict=True))
    like = next((t for t in (*tensors, *whole) if not rows_elsewhere.is_elsewhere(t)), tensors[0])
    return Frame(runner, step, held, like, lambda over, size: runner.blocks(step, size))


def zeros_like_output(buffer: Buffer, frame: Frame) -> Tensor:
    """The gradient of an output to which none comes, in the shape and dtype of the output."""
    assert buffer.node is not None
    return frame.runner.allocate(buffer.node, frame.step, frame.like, zero=True, own=True)
