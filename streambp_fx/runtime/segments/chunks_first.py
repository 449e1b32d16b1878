"""The autograd function of segments whose loops run as one: each chunk goes through all of them.

See NOTE [chunks first] in `passes.step.build`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.graph.facts import Segment
from ...passes.s6_schedule.program import ChunksFirst as Loop
from ...passes.s6_schedule.program.one_loop import HandOn, OneLoop, Within
from ...passes.step.instructions import BufferKind, Over
from ...passes.step.row_chunks import ChunkSize
from .failures import refuse_other_backwards
from .interpreter import Frame, blocks_of, execute, prepare, results_of
from .owned_buffers import as_it_is
from .segment_function import zeros_like_output
from .segment_runner import SegmentRunner
from .step_blocks import RowBlock, StepData


@dataclass(frozen=True)
class Chain:
    """Neighbouring segments, in order, with what runs them.

    Attributes:
        segments, runners: of each.
        forward: the loop over chunks.
        backward: that of the backward.
    """

    segments: list[Segment]
    runners: list[SegmentRunner]
    forward: Loop
    backward: Loop

    def given(self, k: int) -> list[Node]:
        """What the k-th segment reads that has a gradient or may have one, but for what is handed to it."""
        rows = [n for n in self.segments[k].rows if k == 0 or n not in self.segments[k - 1].outputs]
        return [*rows, *self.segments[k].constants]

    @property
    def inputs(self) -> list[Node]:
        """The same of all segments, one after the other; what several read is there several times."""
        return [n for k in range(len(self.segments)) for n in self.given(k)]

    @property
    def whole(self) -> list[list[Node]]:
        """Values without a gradient that each reads."""
        return [s.whole for s in self.segments]


class ChunksFirstFunction(torch.autograd.Function):
    """Autograd function of a chain of segments: keeps what comes in, and their states."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, step: StepData, whole: list[list[Tensor]], *tensors: Tensor) -> Any:
        """Rows of the last segment.

        Args:
            whole: values of `chain.whole`.
            tensors: of `chain.inputs`, in the shapes and dtypes that the graph gives them.
        """
        frames = _frames(chain, step, tensors, whole)
        results = _run(chain.forward.loop, frames)
        outputs = results[-1][: len(chain.segments[-1].outputs)]
        states = [own[len(outputs) if k == len(frames) - 1 else 0 :] for k, own in enumerate(results)]
        ctx.chain, ctx.step = chain, step
        ctx.counts = [len(tensors), *(len(own) for own in whole), *(len(own) for own in states)]
        ctx.save_for_backward(*map(as_it_is, itertools.chain(tensors, *whole)), *itertools.chain(*states))
        for call in (*chain.backward.again, *chain.backward.body):
            frames[call.segment].passing |= frozenset(call.procedure.passing)
            prepare(call.procedure, frames[call.segment])
        ctx.set_materialize_grads(False)
        pairs = zip(chain.segments[-1].outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(o for n, o in pairs if n not in chain.runners[-1].facts.needs_grad))
        return tuple(outputs)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Gradients of the arguments of `forward`; None for those that no gradient reaches."""
        refuse_other_backwards(gradients)
        chain: Chain = ctx.chain
        if all(g is None for g in gradients):
            return (None,) * (3 + len(chain.inputs))
        with torch._C._DisableAutocast():
            return (None, None, None, *_gradients(ctx, chain, gradients))


def _gradients(ctx: Any, chain: Chain, gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    saved = iter(ctx.saved_tensors)
    number = len(chain.segments)
    every = [list(itertools.islice(saved, n)) for n in ctx.counts]
    tensors, whole, states = every[0], every[1 : 1 + number], every[1 + number :]
    frames = _frames(chain, ctx.step, tensors, whole)
    first = 0
    for k, (frame, own) in enumerate(zip(frames.values(), states, strict=True)):
        frame.tensors.update(zip(frame.runner.programs.buffers(BufferKind.STATE), own, strict=True))
        frame.function = _part_of(ctx, chain, k, first)
        first += len(chain.given(k))
    begin, *_, last = frames.values()
    given = dict(zip(last.runner.segment.outputs, gradients, strict=True))
    for buffer in last.runner.programs.buffers(BufferKind.COTANGENT):
        own = given[last.runner.twins[buffer.node]]  # type: ignore[index]
        last.tensors[buffer] = zeros_like_output(buffer, last) if own is None else own.contiguous()
        begin.tensors.update((b, last.tensors[buffer]) for b in chain.backward.body[-1].way.overwrites)
    del every, tensors, states, saved
    results = _run(chain.backward.loop, frames)[number:]
    gradients_of: list[dict[Node, Tensor]] = [{} for _ in chain.segments]
    for call, k, made in zip(chain.backward.body, reversed(range(number)), results, strict=False):
        nodes = (chain.runners[k].twins[b.node] for b in call.procedure.results if b.node is not None)
        gradients_of[k] = dict(zip(nodes, made, strict=True))
    for k, found in enumerate(gradients_of):
        for node in chain.runners[k].diff_rows:
            if node in found:
                ctx.step.owned.add(found[node])
        yield from (found.get(n) for n in chain.given(k))


def _part_of(function: Any, chain: Chain, k: int, first: int) -> Any:
    """An autograd node as one segment sees it: what follows are its streamed inputs, then its constants."""
    handed = len(chain.segments[k].rows) + len(chain.segments[k].constants) - len(chain.given(k))
    following = function.next_functions[first : first + len(chain.given(k))]
    return SimpleNamespace(next_functions=((None, 0),) * handed + following)


def _run(loop: OneLoop, frames: dict[int, Frame]) -> list[list[Tensor]]:
    """Run a loop over the chunks of several segments.

    Returns:
        The results of each call.
    """
    for call in loop.calls:
        frames[call.segment].passing |= frozenset(call.procedure.passing)
    for own in loop.before:
        _execute(own, frames)
    every = {c.segment: blocks_of(c.procedure.around_loop()[1], frames[c.segment]) for c in loop.calls}
    chunks = list(zip(*every.values(), strict=True))
    for chunk in reversed(chunks) if loop.reverse else chunks:
        for segment, (index, block) in zip(every, chunk, strict=True):
            frames[segment].index, frames[segment].block = index, block
        for own in loop.body:
            _execute(own, frames)
    for own in loop.after:
        _execute(own, frames)
    return [results_of(call.procedure, frames[call.segment]) for call in loop.calls]


def _execute(own: Within, frames: dict[int, Frame]) -> None:
    """Run one instruction; what is handed on is there once, laid out as the rows of a buffer are."""
    instruction, frame = own.instruction, frames[own.call.segment]
    if isinstance(instruction, HandOn):
        rows = frame.tensors.pop(instruction.buffer)
        frames[instruction.segment].tensors[instruction.taken] = rows.contiguous()
    else:
        execute(instruction, frame)


def _blocks(runner: SegmentRunner, step: StepData, over: Over, size: ChunkSize) -> list[RowBlock]:
    assert over is Over.RUN
    return runner.blocks(step, size)


def _frames(
    chain: Chain, step: StepData, tensors: Sequence[Tensor], whole: Iterable[Sequence[Tensor]]
) -> dict[int, Frame]:
    """What the segments begin with, by their indices, in order."""
    every, found = iter(tensors), {}
    for k, (segment, runner, others) in enumerate(zip(chain.segments, chain.runners, whole, strict=True)):
        values = dict(zip(chain.given(k), every, strict=False))
        buffers = (
            b for kind in (BufferKind.ROWS, BufferKind.CONSTANT) for b in runner.programs.buffers(kind)
        )
        held = {b: values[n] for b in buffers if (n := runner.twins[b.node]) in values}  # type: ignore[index]
        held.update(zip(runner.programs.buffers(BufferKind.WHOLE), others, strict=True))
        found[segment.index] = Frame(runner, step, held, tensors[0], partial(_blocks, runner, step))
    return found
