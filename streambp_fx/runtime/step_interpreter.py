"""The interpreter of a step: runs the instructions of its forward on tensors, inside PyTorch's autograd.

The backward is run by autograd, node by node: each `Call` of the forward is an autograd function which runs
the procedure that the step program has for the segment's backward, in the order in which they stand there.
What is kept for it is saved by autograd, and what is dropped is dropped by autograd.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from ..passes.graph.facts import Facts, Segment, expression, tensors_of
from ..passes.graph.symbols import evaluate_size
from ..passes.s2_prove.inner_outputs import is_shown
from ..passes.s3_cut.alive_bytes import row_axis
from ..passes.s6_schedule.program import (
    Call,
    CallLoss,
    ChunksFirst,
    CollectRows,
    Defer,
    Drop,
    GiveBackParameters,
    Group,
    Layers,
    Leave,
    Return,
    RunPart,
    StepInstruction,
    StepProgram,
    TakeParameters,
)
from ..passes.s6_schedule.program.values import DEVICE
from .lazy_tensors import Anew, LazyOutput, Like
from .offload import Store
from .segments.chunks_first import Chain, ChunksFirstFunction
from .segments.loss_head import OneSweepHead, Sweep
from .segments.own_rows import RowsOfValue
from .segments.owned_buffers import as_it_is
from .segments.segment_function import StreamedSegment
from .segments.segment_runner import SegmentRunner
from .segments.step_blocks import StepData
from .segments.unchunked_segment import UnchunkedSegment
from .several_devices.sharded_parameters import GraphGroups, StepGroups
from .several_devices.shared_values import CountedOnce, Gathered, Own, summed


def _as_it_is(instruction: Defer) -> Anew | None:
    """A lazy output of a step that leaves nothing out."""
    return None


@dataclass
class StepFrame:
    """What a step holds while its forward runs.

    Attributes:
        facts: of the graph.
        runners: by segment; None for one that always runs unchunked.
        program: that is run.
        values: by node; sizes that the caller has given are among them.
        sizes: of the size symbols.
        sweep: over the loss head, if there is one only.
        store: where what is kept lies, if not on the device.
        random: the model draws random numbers.
        anew: how a lazy output is made of a part where the step leaves rows out.
        lazy: such outputs, by position among the results.
        groups: parameters that the step takes and gives back; None: they are there.
        group_of: by parameter, its group.
        stored: what lazy outputs need of parameters that need not be there when they are read.
        collected: values of which all rows are there, of a step whose rows lie on several devices.
        sum_before: called before each instruction of such a step: gradients of leaves that it is the first
            to read are summed over the devices as soon as its backward has run.
        summed: leaves whose gradients are.
        lay_out: called after each instruction, for results that lie in memory as the model has them, see NOTE
            [results that share memory]; `laid_out` has those from which the model goes on.
    """

    facts: Facts
    runners: list[SegmentRunner | None]
    program: StepProgram
    step: StepData
    values: dict[Node, Any]
    sizes: Mapping[sympy.Symbol, int]
    sweep: Sweep | None = None
    store: Store | None = None
    random: bool = False
    anew: Callable[[Defer], Anew | None] = _as_it_is
    lazy: dict[int, Tensor] = field(default_factory=dict)
    groups: StepGroups | None = None
    group_of: Mapping[Node, int] = field(default_factory=dict)
    stored: GraphGroups | None = None
    collected: dict[Node, Tensor] = field(default_factory=dict)
    sum_before: Callable[[StepInstruction, StepFrame], None] | None = None
    summed: frozenset[Node] = frozenset()
    lay_out: Callable[[StepInstruction, StepFrame], None] | None = None
    laid_out: dict[Node, Tensor] = field(default_factory=dict)

    def value(self, node: Node) -> Any:
        """A value of the step, or a size as a number."""
        return value_of(node, self.values, self.sizes)

    def shape_and_strides(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a value as the model has it, in this step; the strides are in elements."""
        fake, resolve = tensors_of(node)[0], self.step.resolve
        found = (tuple(resolve(expression(s)) for s in sizes) for sizes in (fake.shape, fake.stride()))
        shape, strides = found
        return shape, strides

    def read_whole(self, node: Node) -> Any:
        """A value that is read in the same way on all devices; all its rows, if it has any."""
        if node in self.collected:
            return self.collected[node]
        value = self.value(node)
        shared = self.step.own is not None and isinstance(value, Tensor) and value.requires_grad
        return CountedOnce.apply(self.step.own, value) if shared else value

    def lies(self, node: Node) -> RowsOfValue | None:
        """How the rows of a value lie on this device; None if all of it does."""
        own, found = self.step.own, row_axis(self.facts, node)
        return None if own is None or found is None else RowsOfValue.of(own, *found, self.step.resolve)

    def rows(self, node: Node) -> Tensor:
        """A streamed input of a segment in its shape and dtype: of the caller's, the rows of this device."""
        value = self.values[node]
        lies = self.lies(node) if node.op == "placeholder" else None
        return value if lies is None else Own.apply(lies, value)

    def behind(self, instruction: StepInstruction, inputs: list[Any]) -> list[Any]:
        """What an instruction is given, with a node of autograd's where it reads groups of parameters.

        Where rows lie on several devices as well, gradients are summed over those first, and are complete
        before the engine hears of it.
        """
        if self.groups is None:
            return inputs
        found = self.groups.behind(self._read(instruction), inputs)
        return found if self.step.own is None else summed(self.step.own, found)

    def reads_once(self, instruction: StepInstruction) -> bool:
        """True if parameters that an instruction reads are not there in the backward."""
        return self.groups is not None and not self.program.forward_only.isdisjoint(self._read(instruction))

    def before(self, instruction: StepInstruction, outputs: Iterable[Any]) -> None:
        """The backward of an instruction waits for the groups of parameters that it reads."""
        if self.groups is not None:
            self.groups.before(self._read(instruction), outputs)

    def _read(self, instruction: StepInstruction) -> list[int]:
        return sorted({self.group_of[v.node] for v in instruction.inputs if v.node in self.group_of})

    def segment(self, call: Call) -> tuple[Segment, SegmentRunner]:
        """The segment of a call, and what runs its programs."""
        runner = self.runners[call.segment]
        assert runner is not None
        return self.facts.segments[call.segment], runner


def value_of(node: Node, values: Mapping[Node, Any], sizes: Mapping[sympy.Symbol, int]) -> Any:
    """What a node stands for: a value that is there, or a size as a number."""
    if node in values:
        return values[node]
    return evaluate_size(node, lambda expr: int(expr.subs(sizes)))


def run_step(body: Iterable[StepInstruction], frame: StepFrame) -> None:
    """Run instructions of a forward; what they make is in `frame.values`.

    Raises:
        CompileError: a program cannot be traced.
    """
    for instruction in body:
        if frame.sum_before is not None:
            frame.sum_before(instruction, frame)
        EXECUTE[type(instruction)](instruction, frame)
        if frame.lay_out is not None:
            frame.lay_out(instruction, frame)


def _run_part(instruction: RunPart, frame: StepFrame) -> None:
    part = instruction.part
    alike = instruction.segment is None
    given = [frame.read_whole(n) if alike else frame.collected.get(n, frame.value(n)) for n in part.inputs]
    given = frame.behind(instruction, given)
    if alike or frame.reads_once(instruction) or instruction.recorded:  # what a group records it drops
        found = part.module(*given)
    else:
        with _kept_in(frame.store, instruction.place):
            found = UnchunkedSegment.apply(part, frame.step.owned, *given)
    if not alike:
        lies = map(frame.lies, part.outputs)
        found = tuple(v if how is None else Own.apply(how, v) for v, how in zip(found, lies, strict=True))
    frame.collected.clear()
    frame.before(instruction, found)
    frame.values.update(zip(part.outputs, found, strict=True))


def _call(instruction: Call, frame: StepFrame, unread: bool = False) -> None:
    """
    Args:
        unread: a second forward for the sake of what is saved; the outputs need not hold anything.
    """
    segment, runner = frame.segment(instruction)
    backward = frame.program.backward_of(segment.index)
    assert not isinstance(backward, ChunksFirst)
    procedures = None if unread else instruction.procedure, None if backward is None else backward.procedure
    whole = [frame.values[n] for n in segment.whole]
    given = frame.behind(instruction, _inputs(segment, frame))
    with _kept_in(frame.store, instruction.place):
        outputs = StreamedSegment.apply(runner, frame.step, whole, procedures, *given)
    frame.before(instruction, outputs)
    frame.values.update(zip(segment.outputs, outputs, strict=True))


def _call_loss(instruction: CallLoss, frame: StepFrame) -> None:
    segment, runner = frame.segment(instruction)
    scaling = frame.program.backward_of(segment.index)
    assert frame.sweep is not None and isinstance(scaling, Call)
    whole = [frame.values[n] for n in segment.whole]
    procedures = instruction.procedure, scaling.procedure
    given = frame.behind(instruction, _inputs(segment, frame))
    found = OneSweepHead.apply(runner, frame.step, whole, frame.sweep, procedures, *given)
    frame.before(instruction, found)
    frame.values.update(zip(instruction.part.outputs, found, strict=True))


def _chunks_first(instruction: ChunksFirst, frame: StepFrame) -> None:
    pairs = [frame.segment(call) for call in instruction.body]
    backward = frame.program.backward_of(instruction.body[0].segment)
    assert isinstance(backward, ChunksFirst)
    chain = Chain([s for s, _ in pairs], [r for _, r in pairs], instruction, backward)
    whole = [[frame.values[n] for n in own] for own in chain.whole]
    outputs = ChunksFirstFunction.apply(chain, frame.step, whole, *_in_order(chain.inputs, frame))
    frame.values.update(zip(chain.segments[-1].outputs, outputs, strict=True))


def _group(instruction: Group, frame: StepFrame) -> None:
    """PyTorch's checkpoint runs the body again in the backward."""
    outputs = [v.node for v in instruction.results]
    inputs = {n: frame.values[n] for v in instruction.inputs if (n := v.node) is not None}
    fixed = {n: v for n, v in frame.values.items() if not isinstance(v, Tensor)}
    tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
    nodes, runs = list(tensors), itertools.count()  # the function must not hold what segments made
    held = {n: as_it_is(v).requires_grad_(v.requires_grad) for n, v in tensors.items() if v.is_leaf}
    # nor what others hold
    outside = replace(frame, values={}, store=None, sweep=None, anew=_as_it_is, collected={}, lay_out=None)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        again = next(runs) > 0
        local = {**fixed, **dict(zip(nodes, given, strict=True)), **(held if again else {})}
        inner = replace(outside, values=local)
        if again and inner.groups is not None:
            inner.groups = inner.groups.again()
        with contextlib.nullcontext() if again else _read_more_than_once():
            for own in instruction.body:
                unread = again and isinstance(own, Call) and own not in instruction.again
                _call(own, inner, unread=True) if unread else run_step([own], inner)  # type: ignore[arg-type]
        return tuple(local[n] for n in outputs if n is not None)

    with _kept_in(frame.store, instruction.place):
        found = checkpoint(run, *tensors.values(), use_reentrant=False, preserve_rng_state=frame.random)
    frame.values.update(zip(outputs, found, strict=True))  # type: ignore[arg-type]


@contextlib.contextmanager
def _read_more_than_once() -> Iterator[None]:
    """Within a checkpoint: a backward may read what its forward has saved as often as it wants to.

    PyTorch's checkpoint gives each saved value once, and `ctx.saved_tensors` asks for all of them each time.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    backward = torch._C._current_graph_task_id  # another one after `retain_graph=True`

    def read(saved: tuple[Any, dict[int, Any]]) -> Any:
        held, values = saved
        if backward() not in values:
            values.clear()
            values[backward()] = unpack(held)
        return values[backward()]

    with torch.autograd.graph.saved_tensors_hooks(lambda value: (pack(value), {}), read):
        yield


def _layers(instruction: Layers, frame: StepFrame) -> None:
    for body in instruction.rounds:
        run_step(body, frame)


def _leave(instruction: Leave, frame: StepFrame) -> None:
    if frame.store is not None:
        frame.store.settle(instruction.number)
    _forget(instruction, frame)


def _forget(instruction: StepInstruction, frame: StepFrame) -> None:
    for value in instruction.inputs:
        frame.values.pop(value.node, None)  # type: ignore[arg-type]


def _defer(instruction: Defer, frame: StepFrame) -> None:
    """An output that is computed when it is read, see NOTE [lazy outputs]."""
    part = instruction.part
    (node,) = part.outputs
    fake, (shape, strides) = tensors_of(node)[0], frame.shape_and_strides(node)
    like = Like(torch.Size(shape), strides, fake.dtype, fake.device)
    given, anew = [frame.value(n) for n in part.inputs], frame.anew(instruction)
    read = None if anew is not None else part.inputs
    stored = None if frame.stored is None else frame.stored.after(frame.groups, read)
    made = LazyOutput.apply(part, like, anew, stored, *given)
    frame.before(instruction, [made])
    made.of_the_loss = is_shown(frame.facts, node)
    frame.lazy[instruction.position] = made


def _collect_rows(instruction: CollectRows, frame: StepFrame) -> None:
    for value in instruction.inputs:
        assert value.node is not None
        own = frame.values[value.node]
        frame.collected[value.node] = Gathered.apply(frame.lies(value.node), instruction.partial, own)


def _take_parameters(instruction: TakeParameters, frame: StepFrame) -> None:
    if frame.groups is not None and not instruction.of_caller:
        frame.groups.take(instruction.group)


def _give_back_parameters(instruction: GiveBackParameters, frame: StepFrame) -> None:
    if frame.groups is not None and not instruction.of_caller:
        frame.groups.give_back(instruction.group)


def _nothing(instruction: StepInstruction, frame: StepFrame) -> None:
    """What is returned is what the executor takes."""


def _inputs(segment: Segment, frame: StepFrame) -> list[Tensor]:
    """Streamed inputs and constants, in the order in memory that programs take them to have.

    What comes out of a segment that runs unchunked may be a view, or lie otherwise than its fake tensor.
    """
    return _in_order((*segment.rows, *segment.constants), frame)


def _in_order(nodes: Iterable[Node], frame: StepFrame) -> list[Tensor]:
    """Parameters as they are; the others contiguous."""
    by_rows = {n for s in frame.facts.segments for n in s.rows}
    given = ((n, frame.rows(n) if n in by_rows else frame.values[n]) for n in nodes)
    return [v.contiguous() if n in by_rows or n.op == "call_function" else v for n, v in given]


def _kept_in(store: Store | None, place: str) -> Any:
    """What is saved meanwhile lies in a store."""
    if store is None or place == DEVICE:
        return contextlib.nullcontext()
    store.begin()
    return torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack)


EXECUTE: Mapping[type, Callable[[Any, StepFrame], None]] = {
    RunPart: _run_part,
    Call: _call,
    CallLoss: _call_loss,
    ChunksFirst: _chunks_first,
    Group: _group,
    Layers: _layers,
    Leave: _leave,
    Drop: _forget,
    Defer: _defer,
    Return: _nothing,
    CollectRows: _collect_rows,
    TakeParameters: _take_parameters,
    GiveBackParameters: _give_back_parameters,
}
