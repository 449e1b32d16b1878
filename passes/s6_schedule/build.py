"""schedule: the instructions of a training step, from the segments, their programs and the memory policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from ..graph.facts import Facts, Kind, Segment, shape_of, tensors_of
from ..graph.subgraph import Subgraph
from ..s3_cut.alive_bytes import row_axis
from ..s5_lower.programs import SegmentPrograms
from ..step.instructions import Buffer, BufferKind
from ..step.way import Way, is_half
from .program import (
    Add,
    Call,
    CallLoss,
    Defer,
    Differentiate,
    HandOver,
    Linearize,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    StepProgram,
    Zeros,
)
from .program.values import CALLER, EPILOGUE, Value, ValueKind
from .step_parts import StepParts


def schedule(
    parts: StepParts,
    full: frozenset[int] = frozenset(),
    training: bool = True,
    seeds: Iterable[Node] | None = None,
) -> StepProgram:
    """The step as its segments come, each of which keeps its inputs where they are.

    Args:
        parts: what the step is made of.
        full: segments of which some row may read all rows, see NOTE [rows that see nothing].
        training: there is a backward.
        seeds: results to which the caller has gradients; None: the loss, if one result is a number. What
            else the caller may differentiate has its place in the backward, with a gradient of zero.
    """
    return Scheduler(parts, full, training, seeds).program()


class Scheduler:
    """Makes the step program of a graph; see `schedule` for the arguments.

    Attributes:
        own: of each segment, its programs, or the subgraph that runs it unchunked in this step.
        reached: values to which a gradient comes.
        contributors: of each such value, who adds to its gradient, in the order in which they do.
    """

    def __init__(
        self, parts: StepParts, full: frozenset[int], training: bool, seeds: Iterable[Node] | None
    ) -> None:
        self.parts, self.facts, self.full, self.training = parts, parts.facts, full, training
        self.own = [self._own(s, o) for s, o in zip(self.facts.segments, parts.segments, strict=True)]
        results = [n for n in self.facts.results if isinstance(n, Node) and tensors_of(n)]
        self.lazy = lazy = [n for p in parts.lazy.values() for n in p.outputs]
        self.returned = list(dict.fromkeys([*results, *lazy]))
        differentiable = [n for n in self.returned if n in self.facts.needs_grad] if training else []
        if seeds is None:
            loss = the_loss(found := [n for n in differentiable if n not in lazy])
            self.seeds = found if loss is None else [loss]
        else:
            self.seeds = list(seeds)
        position = parts.one_sweep
        self.one_sweep = position is not None and parts.epilogue.outputs[position] in self.seeds
        self.reached = self._reached(differentiable if seeds is None else self.seeds)
        self.contributors = self._contributors()

    def program(self) -> StepProgram:
        """The step."""
        given = [n for n in self.facts.nodes if n.op in ("placeholder", "get_attr") and self._is_value(n)]
        leaves = [n for n in given if n in self.contributors]
        return StepProgram(
            facts=self.facts,
            given=_captured(given),
            returned=self._returned(),
            gradients=tuple(Value(ValueKind.GRADIENT, n) for n in leaves),
            prologue=tuple(self._prologue()),
            forward=tuple(self._forward()),
            backward=tuple(self._backward()) if self.training else (),
        )

    def _returned(self) -> tuple[Value, ...]:
        lazy = tuple(Value(ValueKind.LAZY, n) for n in self.lazy)
        return (*_captured(n for n in self.returned if n not in self.lazy), *lazy)

    # ---- what there is

    def _own(self, segment: Segment, own: SegmentPrograms | Subgraph) -> SegmentPrograms | Subgraph:
        """What runs a segment: whole if all states would come first, see NOTE [chained states]."""
        chained = segment.chained and segment.index in self.full
        return self.parts.unchunked_form(segment) if chained else own

    def _is_value(self, node: Node) -> bool:
        return self.facts.kinds[node] is not Kind.SIZE

    def _values(self, nodes: Iterable[Node]) -> tuple[Value, ...]:
        return _captured(n for n in nodes if self._is_value(n))

    def _read(self, segment: Segment, own: SegmentPrograms | Subgraph) -> list[Node]:
        """What a segment is given."""
        return (
            own.inputs if isinstance(own, Subgraph) else [*segment.rows, *segment.constants, *segment.whole]
        )

    def _differentiated(self, segment: Segment) -> list[Node]:
        """Inputs of a segment that have a gradient, in order: rows, then constants."""
        own = self.own[segment.index]
        nodes = own.inputs if isinstance(own, Subgraph) else [*segment.rows, *segment.constants]
        return [n for n in nodes if n in self.facts.needs_grad]

    def _reached(self, seeds: Iterable[Node]) -> set[Node]:
        found = set(seeds)
        parts = (self.parts.epilogue, *self.parts.lazy.values())
        for part in parts:
            if any(n in found for n in part.outputs):
                found.update(n for n in part.inputs if n in self.facts.needs_grad)
        for segment in reversed(self.facts.segments):
            if self._is_reached(segment, found):
                found.update(self._differentiated(segment))
        return found

    def _is_reached(self, segment: Segment, reached: set[Node]) -> bool:
        return any(n in reached and n in self.facts.needs_grad for n in segment.outputs)

    def _backward_order(self) -> Iterator[Segment]:
        for segment in reversed(self.facts.segments):
            if self._is_reached(segment, self.reached) and self._differentiated(segment):
                yield segment

    def _contributors(self) -> dict[Node, list[int]]:
        found: dict[Node, list[int]] = {n: [CALLER] for n in self.seeds}
        if self._epilogue_is_differentiated():
            for node in self._of_epilogue():
                found.setdefault(node, []).append(EPILOGUE)
        for segment in self._backward_order():
            for node in self._differentiated(segment):
                found.setdefault(node, []).append(segment.index)
        return found

    def _of_epilogue(self) -> list[Node]:
        return [n for n in self.parts.epilogue.inputs if n in self.facts.needs_grad]

    def _epilogue_is_differentiated(self) -> bool:
        outputs = self.parts.epilogue.outputs
        return not self.one_sweep and any(n in self.seeds for n in outputs) and bool(self._of_epilogue())

    # ---- forward

    def _prologue(self) -> Iterator[StepInstruction]:
        part = self.parts.whole
        if part.outputs:
            results = self._values(part.outputs)
            yield RunPart(part=part, name="whole values", inputs=self._values(part.inputs), results=results)
        if self.one_sweep:
            head, epilogue = self.facts.segments[-1], self.parts.epilogue
            read = self._values(n for n in epilogue.inputs if n not in head.outputs)
            yield Linearize(part=epilogue, inputs=read, results=(_coefficients(head),))

    def _forward(self) -> Iterator[StepInstruction]:
        last = len(self.facts.segments) - 1
        for segment in self.facts.segments:
            if self.one_sweep and segment.index == last:
                yield self._loss(segment)
            else:
                yield self._segment(segment)
        epilogue = self.parts.epilogue
        if epilogue.outputs and not self.one_sweep:
            inputs = self._values(epilogue.inputs)
            yield RunPart(part=epilogue, name="epilogue", inputs=inputs, results=self._of_the_epilogue())
        asked = self.parts.predicates
        made = self._values(n for n in asked.outputs if n not in asked.inputs)
        if made:
            inputs = self._values(asked.inputs)
            yield RunPart(part=asked, name="predicates", inputs=inputs, results=made)
        for position, part in self.parts.lazy.items():
            results = tuple(Value(ValueKind.LAZY, n) for n in part.outputs)
            yield Defer(part=part, position=position, inputs=self._values(part.inputs), results=results)
        yield Return(inputs=self._returned())

    def _segment(self, segment: Segment) -> StepInstruction:
        own = self.own[segment.index]
        inputs, results = self._values(self._read(segment, own)), self._values(segment.outputs)
        if isinstance(own, Subgraph):
            return RunPart(part=own, name="segment", segment=segment.index, inputs=inputs, results=results)
        way = self._way(segment)
        kept = _kept(segment) if way.saves else ()
        return Call(
            programs=own,
            segment=segment.index,
            procedure_name="forward",
            way=way,
            inputs=inputs,
            results=(*results, *kept),
        )

    def _way(self, segment: Segment, overwrites: frozenset[Buffer] = frozenset(), half: bool = False) -> Way:
        full, own = segment.index in self.full, self.own[segment.index]
        chunked = isinstance(own, SegmentPrograms) and not full
        saving = chunked and self.training and self._is_reached(segment, self.reached)
        saves = self.parts.policy.saves(segment) if saving else ()
        return Way(full, False, overwrites, half, saves=saves)

    def _loss(self, segment: Segment) -> StepInstruction:
        own, epilogue, position = self.own[segment.index], self.parts.epilogue, self.parts.one_sweep
        assert isinstance(own, SegmentPrograms) and position is not None
        given = self._values(self._read(segment, own))
        more = self._values(n for n in epilogue.inputs if n not in segment.outputs)
        return CallLoss(
            programs=own,
            segment=segment.index,
            procedure_name="loss",
            way=self._way(segment, half=is_half(segment)),
            part=epilogue,
            position=position,
            inputs=(_coefficients(segment), *given, *more),
            results=(*self._of_the_epilogue(), *self._unscaled(segment)),
        )

    def _of_the_epilogue(self) -> tuple[Value, ...]:
        """What it makes; what it is given and returns (the new value of a buffer) is there already."""
        part = self.parts.epilogue
        return self._values(n for n in part.outputs if n not in part.inputs)

    def _unscaled(self, segment: Segment) -> tuple[Value, ...]:
        found = self._differentiated(segment)
        return tuple(Value(ValueKind.UNSCALED, n, segment.index) for n in found)

    # ---- backward

    def _backward(self) -> Iterator[StepInstruction]:
        # a scaling multiplies by the gradient of the loss, which is the caller's
        yield Seed(results=tuple(self._part_of(n, CALLER) for n in self.seeds))
        yield from self._added(self.seeds, CALLER)
        if self._epilogue_is_differentiated():
            yield from self._differentiate_epilogue()
        last = len(self.facts.segments) - 1
        for segment in self._backward_order():
            if self.one_sweep and segment.index == last:
                yield self._scaling(segment)
            else:
                yield from self._segment_backward(segment)
            yield from self._added(self._differentiated(segment), segment.index)

    def _part_of(self, node: Node, by: int) -> Value:
        """What one contributor makes: the gradient itself if it is the only one."""
        alone = len(self.contributors[node]) == 1
        return Value(ValueKind.GRADIENT, node, None if alone else by)

    def _added(self, nodes: Iterable[Node], by: int) -> Iterator[StepInstruction]:
        """Parts are added to what there is; what is complete and the caller's is handed over."""
        complete = []
        for node in nodes:
            total, order = Value(ValueKind.GRADIENT, node), self.contributors[node]
            if len(order) > 1:
                before = () if order[0] == by else (total,)
                yield Add(inputs=(*before, self._part_of(node, by)), results=(total,))
            if order[-1] == by and node.op in ("placeholder", "get_attr"):
                complete.append(total)
        if complete:
            yield HandOver(inputs=tuple(complete))

    def _differentiate_epilogue(self) -> Iterator[StepInstruction]:
        epilogue, wanted = self.parts.epilogue, self._of_epilogue()
        cotangents = [Value(ValueKind.GRADIENT, n) for n in epilogue.outputs if n in self.seeds]
        yield Differentiate(
            part=epilogue,
            name="epilogue",
            inputs=(*cotangents, *self._values(epilogue.inputs)),
            results=tuple(self._part_of(n, EPILOGUE) for n in wanted),
        )
        yield from self._added(wanted, EPILOGUE)

    def _scaling(self, segment: Segment) -> StepInstruction:
        own = self.own[segment.index]
        assert isinstance(own, SegmentPrograms)
        assert self.parts.one_sweep is not None
        loss = self.parts.epilogue.outputs[self.parts.one_sweep]
        return Call(
            programs=own,
            segment=segment.index,
            procedure_name="scaling",
            way=self._way(segment, half=is_half(segment)),
            inputs=(*self._unscaled(segment), Value(ValueKind.GRADIENT, loss)),
            results=tuple(self._part_of(n, segment.index) for n in self._differentiated(segment)),
        )

    def _segment_backward(self, segment: Segment) -> Iterator[StepInstruction]:
        own, wanted = self.own[segment.index], [n for n in segment.outputs if n in self.facts.needs_grad]
        cotangents = [Value(ValueKind.GRADIENT, n) for n in wanted]
        results = tuple(self._part_of(n, segment.index) for n in self._differentiated(segment))
        given = self._values(self._read(segment, own))
        if isinstance(own, Subgraph):
            cotangents = [c for c in cotangents if c.node in self.contributors] or cotangents
        none = tuple(c for c in cotangents if c.node not in self.contributors)
        if none:
            yield Zeros(results=none)
        if isinstance(own, Subgraph):
            inputs = (*cotangents, *given)
            yield Differentiate(
                part=own, name="segment", segment=segment.index, inputs=inputs, results=results
            )
            return
        over = overwritten_cotangent(self.facts, segment, own)
        way = self._way(segment, over)
        kept = _kept(segment) if way.saves else ()
        yield Call(
            programs=own,
            segment=segment.index,
            procedure_name="backward",
            way=way,
            inputs=(*cotangents, *given, *kept),
            results=results,
        )


def overwritten_cotangent(facts: Facts, segment: Segment, programs: SegmentPrograms) -> frozenset[Buffer]:
    """The cotangent over which the gradient of a segment's input is written, if they have the same form."""
    if written_over(facts, segment, segment) is None:
        return frozenset()
    return frozenset({Buffer(BufferKind.COTANGENT, programs.diff_outputs[0])})


def written_over(facts: Facts, first: Segment, last: Segment) -> Node | None:
    """The output of `last` over whose gradient that of the streamed input of `first` may be written.

    None if there are several of either, they have not the same form, or somebody else may hold that gradient:
    that of what the model returns.
    """
    rows = [n for n in first.rows if n in facts.needs_grad]
    outputs = [n for n in last.outputs if n in facts.needs_grad]
    if len(rows) != 1 or len(outputs) != 1 or outputs[0] in facts.outputs:
        return None
    same = tensors_of(rows[0])[0].dtype == tensors_of(outputs[0])[0].dtype
    alike = shape_of(rows[0]) == shape_of(outputs[0])
    lies = row_axis(facts, rows[0]) == row_axis(facts, outputs[0])
    return outputs[0] if same and alike and lies else None


def the_loss(results: Iterable[Node]) -> Node | None:
    """The one number among the results that have a gradient; None if there is none, or several."""
    numbers = [n for n in results if tensors_of(n)[0].dim() == 0]
    return numbers[0] if len(numbers) == 1 else None


def _captured(nodes: Iterable[Node]) -> tuple[Value, ...]:
    return tuple(Value(ValueKind.CAPTURED, n) for n in nodes)


def _kept(segment: Segment) -> tuple[Value, ...]:
    return (Value(ValueKind.KEPT, segment=segment.index),)


def _coefficients(head: Segment) -> Value:
    return Value(ValueKind.COEFFICIENTS, head.outputs[0])
