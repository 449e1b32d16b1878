"""What a step holds and runs, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
from torch.fx import Node

from ..passes.graph.facts import shape_of, tensors_of
from ..passes.s6_schedule.collectives import Collective, CollectiveKind, collectives_of
from ..passes.s6_schedule.program import (
    Add,
    Again,
    Call,
    CallLoss,
    ChunksFirst,
    CollectRows,
    Defer,
    Differentiate,
    Drop,
    Fetch,
    GiveBackParameters,
    Group,
    HandOver,
    Layers,
    Leave,
    Linearize,
    ReduceGradients,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    StepProgram,
    SumShares,
    TakeParameters,
    Zeros,
    flat,
)
from ..passes.s6_schedule.program.values import Value, ValueKind
from ..passes.s6_schedule.rows_elsewhere import rows_elsewhere
from ..runtime.several_devices.shared_values import LARGE
from .held_bytes import DATA, GATHERED, HIDDEN, LOSS, OUTPUTS, PARAMETERS, SUMMED, Moment, Sizes
from .procedures import ProcedureWalk
from .programs import ProgramCosts


class StepWalk(ProcedureWalk):
    """Follows a step program, and notes what is held.

    Args:
        cost: costs of the programs.
        program: the step.
        sizes: as numbers or symbols.
    """

    def __init__(self, cost: ProgramCosts, program: StepProgram, sizes: Sizes) -> None:
        super().__init__(cost, sizes)
        self.program, self.phase = program, "forward"
        self.elsewhere: dict[Any, tuple[str, Any]] = {}
        self.by_chunks = rows_elsewhere(program)
        self.whole = set(cost.executor.parts.whole.outputs)
        self.leaves = {v.node for v in program.gradients}  # values of the caller's that have a gradient
        self.alive: dict[int, set[Node]] = {}  # by storage: whole values that lie in it
        sums = (i for i in flat(program.backward) if isinstance(i, ReduceGradients) and i.group is not None)
        self.in_groups = {v.node for i in sums for v in i.inputs}  # whose gradients a group sums
        self.gathers = _followed(program)

    def moments(self) -> Iterator[Moment]:
        """The step, moment by moment. A gather is beside the segment after it, a sum beside the last one."""
        waiting: list[Moment] = []
        last = 0
        for moment in self._all_moments():
            if moment.collective is not None and moment.program == CollectiveKind.ALL_GATHER.value:
                waiting.append(moment)
                continue
            last = last if moment.collective is not None else moment.segment
            yield from (replace(m, segment=last) for m in waiting)
            waiting = []
            yield replace(moment, segment=last)
        yield from (replace(m, segment=last) for m in waiting)

    def _all_moments(self) -> Iterator[Moment]:
        yield from self._follow((*self.program.prologue, *self.program.forward))
        self.phase = "backward"
        yield from self._follow(self.program.backward)

    def _follow(self, body: Iterable[StepInstruction]) -> Iterator[Moment]:
        for instruction in body:
            yield from COUNT[type(instruction)](self, instruction)

    def _nothing(self, instruction: Defer | Return | Seed) -> Iterator[Moment]:
        """Nothing that the step holds: what comes from the caller, and goes to it, is the caller's."""
        yield from ()

    # ---- calls and parts

    def _call(self, call: Call) -> Iterator[Moment]:
        for value in call.inputs:  # gradients that the epilogue or the caller has made
            known = value in self.ledger.held or value in self.by_chunks
            if value.kind is ValueKind.GRADIENT and not known and shape_of(value.node):
                self._hold_gradient(value)
        scaled = [v for v in call.inputs if v.kind is ValueKind.UNSCALED]
        for value, result in zip(scaled, call.results, strict=False):
            self._rename(value, result)
        yield from self.walk(call, self.phase)

    def _chunks_first(self, instruction: ChunksFirst) -> Iterator[Moment]:
        for value in instruction.inputs:
            if value.kind is ValueKind.GRADIENT and value not in self.ledger.held and shape_of(value.node):
                self._hold_gradient(value)
        yield from self.walk_one_loop(instruction.loop, self.phase)
        if not instruction.again:
            self._hold_outputs(v for v in instruction.results if v.node in self.facts.segments[-1].outputs)

    def _call_loss(self, call: CallLoss) -> Iterator[Moment]:
        yield from self.walk(call, self.phase)
        if self.cost.devices > 1:
            yield self._losses_gathered(call)
        for buffer in call.procedure.results:  # the rows of the head are read by the epilogue, at once
            self.ledger.drop((call.segment, buffer))
        self._hold_outputs(call.results)

    def _losses_gathered(self, call: CallLoss) -> Moment:
        """The rows of the head, of which the loss is made on each device."""
        nodes = self.runner(call).segment.outputs
        size = sum(self.cost.bytes_of(n, self.sizes) for n in nodes)
        together = self._along(CollectiveKind.ALL_GATHER, "rows of the loss", size)
        return replace(self._together(together, (LOSS, size)), segment=call.segment)

    def _run_part(self, instruction: RunPart) -> Iterator[Moment]:
        if instruction.name == "whole values":
            for value in instruction.results:
                self._hold_whole(value)
        elif instruction.segment is None:
            self._hold_outputs(instruction.results)
        else:
            for value in instruction.results:
                size = self.cost.held_of(_node(value), self.sizes)
                self.ledger.hold(value, self.cause_of_output(value), size)
            again = instruction.recorded and self.phase == "backward"
            yield self._recorded(instruction) if again else self._unchunked_moment(instruction.segment, False)

    def _recorded(self, instruction: RunPart) -> Moment:
        """What autograd keeps of a part until it is differentiated, whose work is counted there."""
        segment = self.facts.segments[instruction.segment]  # type: ignore[index]
        recorded = self.cost.value(self.cost.unchunked_cost(segment).recorded, self.sizes)
        self.ledger.hold(("recorded", segment.index), self.cause_of_programs(segment), recorded)
        return Moment(self.phase, segment.index, None, "unchunked", self.ledger.bytes())

    def _differentiate(self, instruction: Differentiate) -> Iterator[Moment]:
        if instruction.segment is None:
            return  # its gradients are held from where they are read
        for value in instruction.inputs:
            if value.kind is ValueKind.GRADIENT and value not in self.ledger.held:
                self._hold_gradient(value)
        self.ledger.drop(("recorded", instruction.segment))
        yield self._unchunked_moment(instruction.segment, backward=True)
        for value in instruction.results:
            self._hold_gradient(value)

    def _unchunked_moment(self, index: int, backward: bool) -> Moment:
        segment = self.facts.segments[index]
        cost = self.cost.unchunked_cost(segment, backward)
        held = self.ledger.bytes((self.cause_of_programs(segment), self.cost.value(cost.peak, self.sizes)))
        return Moment(self.phase, index, None, "unchunked", held, self.cost.work(cost, self.sizes))

    def bytes_of(self, value: Value) -> Any:
        """Bytes of a value."""
        if value.kind is ValueKind.KEPT:
            calls = self.program.calls()
            return self.saved_bytes(next(c for c in calls if value in c.results))
        return self.cost.held_of(_node(value), self.sizes)

    def _group(self, instruction: Group) -> Iterator[Moment]:
        yield from self._follow(instruction.body)

    def _again(self, instruction: Again) -> Iterator[Moment]:
        for moment in self._follow(instruction.body):
            yield replace(moment, segment=instruction.segment)  # it is its backward that waits

    def _layers(self, instruction: Layers) -> Iterator[Moment]:
        for body in instruction.rounds:
            yield from self._follow(body)

    # ---- what is held

    def _hold_outputs(self, values: Iterable[Value]) -> None:
        for value in values:
            if value.kind is ValueKind.CAPTURED and shape_of(_node(value)):
                self.ledger.hold(value, OUTPUTS, self.cost.bytes_of(_node(value), self.sizes))

    def _hold_gradient(self, value: Value) -> None:
        node = _node(value)
        cause = PARAMETERS if node in self.leaves else HIDDEN
        self.ledger.hold(value, cause, self.cost.held_of(node, self.sizes))

    def _linearize(self, instruction: Linearize) -> Iterator[Moment]:
        for value in instruction.results:
            self.ledger.hold(value, LOSS, self.cost.bytes_of(_node(value), self.sizes))
        yield from ()

    def _zeros(self, instruction: Zeros) -> Iterator[Moment]:
        for value in instruction.results:
            self._hold_gradient(value)
        yield from ()

    def _add(self, instruction: Add) -> Iterator[Moment]:
        part, (total,) = instruction.inputs[-1], instruction.results
        if len(instruction.inputs) == 1 and part in self.ledger.held:
            cause, _ = self.ledger.held[part]
            self.ledger.hold(total, cause, self.cost.held_of(_node(total), self.sizes))
        self.ledger.drop(part)
        yield from ()

    def _rename(self, value: Value, result: Value) -> None:
        if value in self.ledger.held:
            self.ledger.held[result] = self.ledger.held.pop(value)

    def _let_go(self, instruction: Drop | HandOver) -> Iterator[Moment]:
        for value in instruction.inputs:
            if value.kind is ValueKind.CAPTURED and value.node in self.whole:
                self._drop_whole(value)
            self.ledger.drop(value)
        yield from ()

    def _leave(self, instruction: Leave) -> Iterator[Moment]:
        """They have left the device: while the next segments ran, they were on their way."""
        for value in instruction.inputs:
            if value in self.ledger.held:
                self.elsewhere[value] = self.ledger.held.pop(value)
        yield from ()

    def _fetch(self, instruction: Fetch) -> Iterator[Moment]:
        """They are back, or on their way back."""
        for value in instruction.inputs:
            if value in self.elsewhere:
                self.ledger.held[value] = self.elsewhere.pop(value)
        yield from ()

    # ---- several devices

    def _take_parameters(self, instruction: TakeParameters) -> Iterator[Moment]:
        """They are there in full size, beside the piece of this device, and the next ones on their way."""
        size = sum(self.cost.bytes_of(_node(v), self.sizes) for v in instruction.inputs)
        self.ledger.hold(("group", instruction.group), GATHERED, size)
        for collective in collectives_of(self.program, instruction):
            yield self._together(collective)
            self.ledger.drop("on its way")
            following = self.gathers[(self.phase, instruction.group)] if collective.ahead else None
            if following is not None:
                self.ledger.hold("on its way", GATHERED, following)

    def _give_back_parameters(self, instruction: GiveBackParameters) -> Iterator[Moment]:
        if not instruction.stays:
            self.ledger.drop(("group", instruction.group))
        yield from ()

    def _hand_over(self, instruction: HandOver) -> Iterator[Moment]:
        """Gradients that are the caller's count as gradients; those of a group are there in full until they
        are summed."""
        yield from self._let_go(instruction)
        for value in instruction.inputs:
            if value.node in self.in_groups:
                size = self.cost.bytes_of(_node(value), self.sizes)
                self.ledger.hold(("in full", value.node), PARAMETERS, size)

    def _reduce_gradients(self, instruction: ReduceGradients) -> Iterator[Moment]:
        """They are copied into one piece of memory, which is there until the next sum."""
        found = list(collectives_of(self.program, instruction))
        if instruction.group is not None and found:
            self.ledger.hold("being summed", SUMMED, found[0].bytes)
        yield from map(self._together, found)
        if found and not found[0].ahead:
            self.ledger.drop("being summed")
        self.ledger.drop(*(("in full", v.node) for v in instruction.inputs))

    def _collect_rows(self, instruction: CollectRows) -> Iterator[Moment]:
        """All rows are there while the next instruction runs, beside what is packed to be sent."""
        size = sum(self.cost.bytes_of(_node(v), self.sizes) for v in instruction.inputs)
        together = self._along(CollectiveKind.ALL_GATHER, "rows between segments", size)
        yield self._together(together, (OUTPUTS, 2 * size + self.cost.share(size)))

    def _sum_shares(self, instruction: SumShares) -> Iterator[Moment]:
        """Large ones are summed where they lie; others are packed, and are views of that afterwards."""
        nodes = [_node(v) for v in instruction.inputs]
        large = [n for n in nodes if sympy.Mul(*shape_of(n)).subs(self.facts.values) >= LARGE]
        packed = sum(self.cost.bytes_of(n, self.sizes) for n in nodes if n not in large)
        size = sum(self.cost.bytes_of(n, self.sizes) for n in nodes)
        calls = len(large) + (len(large) < len(nodes))
        together = replace(self._along(CollectiveKind.ALL_REDUCE, "shares of gradients", size), calls=calls)
        yield self._together(together, (SUMMED, packed))

    def _along(self, kind: CollectiveKind, name: str, size: Any) -> Collective:
        """A collective of the devices that share a sequence."""
        return Collective(kind, name, self.cost.devices, size, ahead=False)

    def _together(self, collective: Collective, *more: tuple[str, Any]) -> Moment:
        held = self.ledger.bytes(*more)
        return Moment(self.phase, 0, None, collective.kind.value, held, collective=collective)

    def _hold_whole(self, value: Value) -> None:
        """Whole values may share memory, also with an input, which is the caller's."""
        storage = _storage(_node(value))
        self.alive.setdefault(storage, set()).add(_node(value))
        if storage in self.cost.of_caller:
            return
        self.ledger.hold(("whole", storage), DATA, self.cost.bytes_of(_node(value), self.sizes))

    def _drop_whole(self, value: Value) -> None:
        storage = _storage(_node(value))
        self.alive[storage].discard(_node(value))
        if not self.alive[storage]:
            self.ledger.drop(("whole", storage))


def _followed(program: StepProgram) -> dict[tuple[str, int], int | None]:
    """By phase and group the bytes of the next group that is gathered in the phase; None after the last."""
    parts = {"forward": (*program.prologue, *program.forward), "backward": program.backward}
    found: dict[tuple[str, int], int | None] = {}
    for phase, body in parts.items():
        following = None
        for instruction in reversed(list(flat(body))):
            collective = next(collectives_of(program, instruction), None)
            if collective is not None and isinstance(instruction, TakeParameters):
                found[(phase, instruction.group)] = following
                following = collective.bytes
    return found


def _node(value: Value) -> Node:
    assert value.node is not None
    return value.node


def _storage(node: Node) -> int:
    return tensors_of(node)[0].untyped_storage()._cdata


COUNT: Mapping[type, Callable[[StepWalk, Any], Iterator[Moment]]] = {
    RunPart: StepWalk._run_part,
    Differentiate: StepWalk._differentiate,
    Linearize: StepWalk._linearize,
    Call: StepWalk._call,
    CallLoss: StepWalk._call_loss,
    ChunksFirst: StepWalk._chunks_first,
    Group: StepWalk._group,
    Again: StepWalk._again,
    Layers: StepWalk._layers,
    Leave: StepWalk._leave,
    Fetch: StepWalk._fetch,
    Drop: StepWalk._let_go,
    HandOver: StepWalk._hand_over,
    Zeros: StepWalk._zeros,
    Add: StepWalk._add,
    TakeParameters: StepWalk._take_parameters,
    GiveBackParameters: StepWalk._give_back_parameters,
    ReduceGradients: StepWalk._reduce_gradients,
    CollectRows: StepWalk._collect_rows,
    SumShares: StepWalk._sum_shares,
    Defer: StepWalk._nothing,
    Return: StepWalk._nothing,
    Seed: StepWalk._nothing,
}
