"""several: what several devices share is there when it is read, and is summed once."""

from __future__ import annotations

from ...step.faults import Fault
from ..program import (
    Call,
    CallLoss,
    CollectRows,
    Drop,
    GiveBackParameters,
    ReduceGradients,
    Return,
    RunPart,
    StepInstruction,
    TakeParameters,
    segment_of,
)
from ..program.values import Value, ValueKind
from .step_state import State


def check_take_parameters(state: State, instruction: TakeParameters) -> None:
    """A group is taken that is not there.

    Raises:
        Fault: not so.
    """
    group, shared = instruction.group, state.shared
    _is_group(state, instruction)
    if group in shared.gathered:
        raise Fault("it is gathered already")
    if instruction.there != (group in shared.stayed):
        raise Fault("they have not stayed" if instruction.there else "they have stayed, and need no gather")
    shared.gathered[group] = instruction


def check_give_back_parameters(state: State, instruction: GiveBackParameters) -> None:
    """A group is given back that is there.

    Raises:
        Fault: not so.
    """
    group, shared = instruction.group, state.shared
    _is_group(state, instruction)
    if group not in shared.gathered:
        raise Fault("it is not gathered")
    del shared.gathered[group]
    if instruction.stays:
        if state.part == "backward":
            raise Fault("nothing reads them after the backward")
        shared.stayed.add(group)


def _is_group(state: State, instruction: TakeParameters | GiveBackParameters) -> None:
    groups, several = state.program.groups, state.program.several
    if not 0 <= instruction.group < len(groups):
        raise Fault(f"there is no group {instruction.group} of parameters")
    if instruction.inputs != groups[instruction.group]:
        raise Fault("these are not the parameters of the group")
    if instruction.of_caller is not (instruction.group >= len(groups) - len(several.of_caller)):
        raise Fault("it is the other one who takes them, the step or the caller")


def check_reduce_gradients(state: State, instruction: ReduceGradients) -> None:
    """Gradients are summed over the devices when they are handed over, once.

    Raises:
        Fault: not so.
    """
    groups, group, shared = state.program.groups, instruction.group, state.shared
    if (group is None) is (instruction.bucket is None):
        raise Fault("they are those of a group, or of a bucket")
    if group is not None and (
        not 0 <= group < len(groups) or not set(instruction.inputs) <= set(groups[group])
    ):
        raise Fault(f"these are not parameters of group {group}")
    for value in instruction.inputs:
        if Value(ValueKind.GRADIENT, value.node) not in state.gradients.handed_over:
            raise Fault(f"the gradient of {value.name} is not handed over yet")
        if value in shared.summed:
            raise Fault(f"the gradient of {value.name} is summed twice")
        if value not in state.program.summed:
            raise Fault(f"the gradient of {value.name} is not to be summed")
        shared.summed.add(value)


# ---- rows of several devices


def check_collect_rows(state: State, instruction: CollectRows) -> None:
    """Rows are gathered for the next instruction, of which each device has its own.

    Raises:
        Fault: those of the last such instruction were not read.
    """
    if state.shared.collected is not None:
        raise Fault("rows were gathered before, and nobody has read them")
    for value in instruction.inputs:
        state.there(value)
    state.shared.collected = instruction


def check_rows_are_whole(state: State, instruction: StepInstruction) -> None:
    """What reads all rows of a value has them from all devices, and nobody else does.

    Raises:
        Fault: not so.
    """
    shared = state.shared
    if not shared.shares or isinstance(instruction, CollectRows | Drop | TakeParameters | GiveBackParameters):
        return
    gathered, shared.collected = shared.collected, None
    found = () if gathered is None else gathered.inputs
    read = _read_whole(state, instruction)
    missing = [v for v in read if v not in found]
    if missing:
        raise Fault(f"rows of {missing[0].name} are read that other devices have")
    if set(found) != set(read):
        raise Fault("it does not read the rows that are gathered for it")
    if gathered is not None and gathered.partial is not (segment_of(instruction) is not None):
        raise Fault("gradients of the rows that are gathered for it are summed, and must not be, or not")


def _read_whole(state: State, instruction: StepInstruction) -> list[Value]:
    """Values that segments make by rows, of which an instruction reads all rows."""
    if not isinstance(instruction, RunPart | Return | CallLoss):
        return []
    own = set(instruction.bindings().values()) if isinstance(instruction, Call) else set()
    captured = [v for v in instruction.inputs if v.kind is ValueKind.CAPTURED and v not in own]
    return [v for v in captured if v.node in state.shared.by_rows]
