"""checker: proves of a step program, without running it, that it holds what it reads and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .call_checks import check_call, check_chunks_first
from .program import (
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
)
from .program.values import Value, ValueKind
from .step_state import Fault, State, run
from .text import step_line


class UnsoundStep(Exception):
    """A step reads what is not there, or leaves undone what it promises.

    Attributes:
        instruction: the one at which that is seen; None: the end.
    """

    def __init__(self, instruction: StepInstruction | None, words: str) -> None:
        place = "at the end" if instruction is None else f"at `{step_line(instruction)}`"
        super().__init__(f"step program, {place}: {words}")
        self.instruction = instruction


def check_step(program: StepProgram, dropped: bool = True) -> None:
    """Prove that a step program is sound.

    What is read is held, on the device, and was not written over; nothing is made twice; a gradient is read
    when all its parts are added, and only then; what is promised is returned and handed over, once; nothing
    else is left at the end.

    Args:
        dropped: values are dropped when nobody reads them any more; without that something may be left.

    Raises:
        UnsoundStep: it is not.
    """
    state = State(program, dropped)
    for part in (program.prologue, program.forward, program.backward):
        if part is program.backward:
            state.gathered |= program.forward_only  # nobody asks for them
        for instruction in part:
            _follow(state, instruction)
    try:
        state.end()
    except Fault as fault:
        raise UnsoundStep(None, str(fault)) from None


def _follow(state: State, instruction: StepInstruction) -> None:
    try:
        CHECKS[type(instruction)](state, instruction)
    except Fault as fault:
        raise UnsoundStep(instruction, str(fault)) from None


def _run_part(state: State, instruction: RunPart) -> None:
    part = instruction.part
    if [v.node for v in instruction.results] != [n for n in part.outputs if n not in part.inputs]:
        raise Fault("its results are not those of the part")
    run(state, instruction)


def _differentiate(state: State, instruction: Differentiate) -> None:
    given = {v.node for v in instruction.inputs if v.kind is ValueKind.GRADIENT}
    if not given or not given <= set(instruction.part.outputs):
        raise Fault("no gradient of its outputs is read")
    wanted = {v.node for v in instruction.results}
    if not wanted <= set(instruction.part.inputs):
        raise Fault("a result is no gradient of what it reads")
    run(state, instruction)


def _group(state: State, instruction: Group) -> None:
    before = set(state.held)
    for inner in instruction.body:
        _follow(state, inner)
    made = state.held - before
    left = made - set(instruction.results)
    if left and not state.dropped:
        state.held -= left
    elif left:
        raise Fault(f"{min(v.name for v in left)} is left of what it makes")
    if not made.issuperset(instruction.results):
        raise Fault("it does not make its results")
    if not set(instruction.inputs) <= before:
        raise Fault("it does not hold its inputs")


def _again(state: State, instruction: Again) -> None:
    if not state.dropped:
        state.held -= set(instruction.results)
    for inner in instruction.body:
        _follow(state, inner)


def _layers(state: State, instruction: Layers) -> None:
    for body in instruction.rounds:
        for inner in body:
            _follow(state, inner)


def _leave(state: State, instruction: Leave) -> None:
    for value in instruction.inputs:
        state.read(value)
        if value in state.program.given or value in state.program.returned:
            raise Fault(f"{value.name} belongs to the caller")
        state.away.add(value)


def _fetch(state: State, instruction: Fetch) -> None:
    for value in instruction.inputs:
        if value not in state.held or value not in state.away:
            raise Fault(f"{value.name} has not left")
        state.away.remove(value)


def _drop(state: State, instruction: Drop) -> None:
    for value in instruction.inputs:
        if value in state.program.given or value in state.program.returned:
            raise Fault(f"{value.name} belongs to the caller")
        if value.kind is ValueKind.UNSCALED:
            raise Fault(f"{value.name} is dropped before it is scaled")
        state.complete(value)
        state.let_go(value)


def _return(state: State, instruction: Return) -> None:
    for value in instruction.inputs:
        state.read(value)
        if value in state.returned:
            raise Fault(f"{value.name} is returned twice")
        state.returned.add(value)


def _seed(state: State, instruction: Seed) -> None:
    for value in instruction.results:
        if not any(v.node is value.node for v in state.returned):
            raise Fault(f"{value.name}: the caller was not given what it is the gradient of")
        state.make(value)


def _add(state: State, instruction: Add) -> None:
    part, (total,) = instruction.inputs[-1], instruction.results
    state.read(part)
    if part.node is not total.node:
        raise Fault(f"{part.name} is no part of {total.name}")
    if len(instruction.inputs) > 1:
        state.read(instruction.inputs[0])
        if instruction.inputs[0] != total:
            raise Fault(f"the sum is {total.name}, and {instruction.inputs[0].name} is added to")
    else:
        state.make(total)
    state.let_go(part)
    state.to_add[total] -= 1


def _sum_shares(state: State, instruction: SumShares) -> None:
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
        if value in state.whole:
            raise Fault(f"{value.name} is summed twice")
        state.whole.add(value)


def _hand_over(state: State, instruction: HandOver) -> None:
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
        if value not in state.program.gradients:
            raise Fault(f"{value.name} is not what the caller is promised")
        if value in state.handed_over:
            raise Fault(f"{value.name} is handed over twice")
        group = state.group_of.get(Value(ValueKind.CAPTURED, value.node))
        if group is not None and group not in state.gathered:
            raise Fault(f"{value.name} comes after its parameter was given back")
        if state.shares and value not in state.whole:
            raise Fault(f"{value.name} is this device's share, and is not summed")
        state.handed_over.add(value)
        state.let_go(value)


def _take_parameters(state: State, instruction: TakeParameters) -> None:
    if instruction.group in state.gathered:
        raise Fault("it is gathered already")
    if instruction.inputs != state.program.groups[instruction.group]:
        raise Fault("these are not the parameters of the group")
    if instruction.there != (instruction.group in state.stayed):
        raise Fault("they have not stayed" if instruction.there else "they have stayed, and need no gather")
    state.gathered.add(instruction.group)


def _give_back_parameters(state: State, instruction: GiveBackParameters) -> None:
    if instruction.group not in state.gathered:
        raise Fault("it is not gathered")
    state.gathered.remove(instruction.group)
    if instruction.stays:
        state.stayed.add(instruction.group)


def _reduce_gradients(state: State, instruction: ReduceGradients) -> None:
    for value in instruction.inputs:
        if Value(ValueKind.GRADIENT, value.node) not in state.handed_over:
            raise Fault(f"the gradient of {value.name} is not handed over yet")
        if value in state.summed:
            raise Fault(f"the gradient of {value.name} is summed twice")
        state.summed.add(value)


CHECKS: Mapping[type, Callable[[State, Any], None]] = {
    RunPart: _run_part,
    Differentiate: _differentiate,
    Linearize: run,
    Call: check_call,
    CallLoss: check_call,
    ChunksFirst: check_chunks_first,
    Group: _group,
    Again: _again,
    Layers: _layers,
    Leave: _leave,
    Fetch: _fetch,
    Drop: _drop,
    Defer: run,
    Return: _return,
    Seed: _seed,
    Zeros: run,
    Add: _add,
    HandOver: _hand_over,
    CollectRows: run,
    SumShares: _sum_shares,
    TakeParameters: _take_parameters,
    GiveBackParameters: _give_back_parameters,
    ReduceGradients: _reduce_gradients,
}
