"""The autograd function of segments whose loops run as one: each chunk goes through all of them.

See NOTE [chunks first] in `passes.step.build`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.graph.facts import Segment
from ...passes.s4_trace.program_inputs import Extent
from ...passes.s6_schedule.program import Call
from ...passes.s6_schedule.program import ChunksFirst as Loop
from ...passes.step.instructions import Buffer, BufferKind, Chunks, Over, Procedure
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

    def blocks(self, runner: SegmentRunner, step: StepData, over: Over) -> list[RowBlock]:
        """The chunks of one segment: those of the first that reads along the sequence."""
        assert over is Over.RUN
        if runner.segment.mixings:
            return runner.blocks(step)
        leader = next(r for r in self.runners if r.segment.mixings)
        every = leader.blocks(step)
        return [replace(b, extent=Extent(b.extent.rows, 0, b.extent.start, b.extent.total)) for b in every]

    @property
    def whole(self) -> list[list[Node]]:
        """Values without a gradient that each reads."""
        return [s.whole for s in self.segments]


class ChunksFirst(torch.autograd.Function):
    """Autograd function of a chain of segments: keeps what comes in, and their states."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, step: StepData, whole: list[list[Tensor]], *tensors: Tensor) -> Any:
        """Rows of the last segment.

        Args:
            whole: values of `chain.whole`.
            tensors: of `chain.inputs`, in the shapes and dtypes that the graph gives them.
        """
        frames = _frames(chain, step, tensors, whole)
        results = _together(_stages(chain, chain.forward.body, frames))
        outputs = results[-1][: len(chain.segments[-1].outputs)]
        states = [own[len(outputs) if k == len(frames) - 1 else 0 :] for k, own in enumerate(results)]
        ctx.chain, ctx.step = chain, step
        ctx.counts = [len(tensors), *(len(own) for own in whole), *(len(own) for own in states)]
        ctx.save_for_backward(*map(as_it_is, itertools.chain(tensors, *whole)), *itertools.chain(*states))
        again = _stages(chain, chain.backward.again, frames)
        for stage in (*again, *_stages(chain, chain.backward.body, frames)):
            prepare(stage.procedure, stage.frame)
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
    for k, (frame, own) in enumerate(zip(frames, states, strict=True)):
        frame.tensors.update(zip(frame.runner.programs.buffers(BufferKind.STATE), own, strict=True))
        frame.function = _part_of(ctx, chain, k, first)
        first += len(chain.given(k))
    last = frames[-1]
    given = dict(zip(last.runner.segment.outputs, gradients, strict=True))
    for buffer in last.runner.programs.buffers(BufferKind.COTANGENT):
        own = given[last.runner.twins[buffer.node]]  # type: ignore[index]
        last.tensors[buffer] = zeros_like_output(buffer, last) if own is None else own.contiguous()
        frames[0].tensors.update((b, last.tensors[buffer]) for b in chain.backward.body[-1].way.overwrites)
    del every, tensors, states, saved
    stages = [*_stages(chain, chain.backward.again, frames), *_stages(chain, chain.backward.body, frames)]
    results = _together(stages, reverse=True)[number:]
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


@dataclass(frozen=True)
class _Stage:
    """One segment's part of a loop: a procedure with one loop over chunks, and where its rows go.

    Attributes:
        gives: the buffer whose rows of the chunk are handed on; None: none is.
        following: the frame of the segment that takes them, and as what.
    """

    procedure: Procedure
    frame: Frame
    gives: Buffer | None
    following: tuple[Frame, Buffer] | None

    @property
    def loop(self) -> Chunks:
        return self.procedure.around_loop()[1]

    def outside(self, before: bool) -> None:
        """What is done before the loop, or after it."""
        first, _, then = self.procedure.around_loop()
        for instruction in first if before else then:
            execute(instruction, self.frame)

    def chunk(self) -> None:
        """One chunk; what it hands on is there once, laid out as the rows of a buffer are."""
        for instruction in self.loop.body:
            execute(instruction, self.frame)
        if self.gives is not None:
            rows = self.frame.tensors.pop(self.gives)
            if self.following is not None:
                frame, buffer = self.following
                frame.tensors[buffer] = rows.contiguous()


def _stages(chain: Chain, calls: Sequence[Call], frames: list[Frame]) -> list[_Stage]:
    """Of each call, in the order in which a chunk goes through them."""
    places = {s.index: k for k, s in enumerate(chain.segments)}
    found = []
    for call, after in itertools.zip_longest(calls, calls[1:]):
        frame, following = frames[places[call.segment]], None
        backward = call.procedure_name == "backward"
        gives = _passed(call, BufferKind.GRADIENT if backward else BufferKind.OUTPUT)
        if after is not None:
            taken = _passed(after, BufferKind.COTANGENT if backward else BufferKind.ROWS)
            assert taken is not None
            following = frames[places[after.segment]], taken
        frame.passing |= frozenset(call.procedure.passing)
        found.append(_Stage(call.procedure, frame, gives, following))
    return found


def _passed(call: Call, kind: BufferKind) -> Buffer | None:
    """What of this kind a call takes from its neighbour, or hands to it."""
    return next((b for b in call.procedure.passing if b.kind is kind), None)


def _together(stages: list[_Stage], reverse: bool = False) -> list[list[Tensor]]:
    """Run the loops of all as one.

    Args:
        reverse: from the last chunk to the first.

    Returns:
        The results of each.
    """
    for stage in stages:
        stage.outside(before=True)
    every = [blocks_of(stage.loop, stage.frame) for stage in stages]
    chunks = list(zip(*every, strict=True))
    for own in reversed(chunks) if reverse else chunks:
        for stage, (index, block) in zip(stages, own, strict=True):
            stage.frame.index, stage.frame.block = index, block
            stage.chunk()
            if stage.procedure.name == "backward":
                _forget(stage)
    for stage in stages:
        stage.outside(before=False)
    return [results_of(stage.procedure, stage.frame) for stage in stages]


def _forget(stage: _Stage) -> None:
    """The chunk has been differentiated: its rows, and what was kept of it, are let go."""
    stage.frame.kept.clear()
    for buffer in stage.procedure.passing:
        stage.frame.tensors.pop(buffer, None)


def _frames(
    chain: Chain, step: StepData, tensors: Sequence[Tensor], whole: Iterable[Sequence[Tensor]]
) -> list[Frame]:
    """What the segments begin with."""
    every, found = iter(tensors), []
    for k, (runner, others) in enumerate(zip(chain.runners, whole, strict=True)):
        values = dict(zip(chain.given(k), every, strict=False))
        buffers = (
            b for kind in (BufferKind.ROWS, BufferKind.CONSTANT) for b in runner.programs.buffers(kind)
        )
        held = {b: values[n] for b in buffers if (n := runner.twins[b.node]) in values}  # type: ignore[index]
        held.update(zip(runner.programs.buffers(BufferKind.WHOLE), others, strict=True))
        blocks = partial(chain.blocks, runner, step)
        found.append(Frame(runner, step, held, tensors[0], blocks))
    return found
