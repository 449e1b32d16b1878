"""groups: what is run again, what leaves the device and comes back, loops over layers."""

from __future__ import annotations

from collections.abc import Iterable

from ...step.faults import Fault
from ..program import (
    Again,
    Call,
    CallLoss,
    CollectRows,
    Drop,
    Fetch,
    GiveBackParameters,
    Group,
    Layers,
    Leave,
    StepInstruction,
    TakeParameters,
    form_of,
    read_from_outside,
    segment_of,
)
from ..program.values import DEVICE, ValueKind
from .operands import are
from .step_state import State, is_on_device

PLACES = (DEVICE, "host", "disk")
#: What is done around the instructions of a group.
AROUND = (CollectRows, Drop, GiveBackParameters, TakeParameters)


def check_group(state: State, instruction: Group) -> None:
    """It holds what its instructions read, and lets go all that they make but its results.

    Raises:
        Fault: not so.
    """
    before = set(state.held)
    _follow(state, instruction)
    made = state.held - before
    left = made - set(instruction.results)
    if left and not state.dropped:
        state.held -= left
        state.unread -= left
    elif left:
        raise Fault(f"{min(v.name for v in left)} is left of what it makes")
    if not made.issuperset(instruction.results):
        raise Fault("it does not make its results")
    working = _working(instruction.body)
    segments = [segment_of(i) for i in working]
    if not working or None in segments:
        raise Fault("there is something in it that is no segment")
    are(instruction.inputs, read_from_outside(working), "reads")
    again = _working(instruction.again)
    if again != tuple(i for i in working if i in again):
        raise Fault("what is run again is not what was run")
    skipped = {v for i in working if i not in again for v in i.results}
    for value in (v for i in again for v in i.inputs if v in skipped):
        raise Fault(f"{value.name} is read by what is run again, and is not made again")
    last = state.segment(segments[-1]).index
    state.grouped.groups[last] = instruction
    state.grouped.last_of.update({s: last for s in segments if s is not None})


def check_again(state: State, instruction: Again) -> None:
    """What a group has not kept is made again, once.

    Raises:
        Fault: not so.
    """
    group = state.grouped.groups.get(instruction.segment)
    if group is None or instruction.segment in state.grouped.ran_again:
        raise Fault(f"no group ends with segment {instruction.segment}, or it was run again before")
    if state.gradients.differentiated.intersection(s for s in map(segment_of, group.body) if s is not None):
        raise Fault("its group has been differentiated before")
    if not state.dropped:
        state.held -= set(instruction.results)
    _follow(state, instruction)
    own, expected = _working(instruction.body), _working(group.again)
    if not own or own != expected:
        raise Fault("it does not run again what its group has not kept")
    are(instruction.inputs, read_from_outside(expected), "reads")
    are(instruction.results, (v for i in expected for v in i.results), "makes")
    state.grouped.ran_again.add(instruction.segment)


def _follow(state: State, instruction: Group | Again) -> None:
    state.within = instruction
    for inner in instruction.body:
        state.follow(state, inner)
    state.within = None


def _working(body: Iterable[StepInstruction]) -> tuple[StepInstruction, ...]:
    return tuple(i for i in body if not isinstance(i, AROUND))


def check_layers(state: State, instruction: Layers) -> None:
    """All rounds do the same, each to its own values.

    Raises:
        Fault: they do not.
    """
    for body in instruction.rounds:
        for inner in body:
            state.follow(state, inner)
    forms = {tuple(map(form_of, body)) for body in instruction.rounds}
    if len(forms) != 1 or forms == {()}:
        raise Fault("not all layers do the same")


# ---- where something lies


def check_place(state: State, instruction: StepInstruction) -> None:
    """What a backward reads is kept in a place that there is, all of it in the same.

    Raises:
        Fault: not so.
    """
    place = getattr(instruction, "place", DEVICE)
    if place not in PLACES:
        raise Fault(f"there is no place {place!r}")
    keeps = isinstance(instruction, Group | Call) or segment_of(instruction) is not None
    forward = state.part == "forward" and state.within is None
    if not keeps or not forward or isinstance(instruction, CallLoss):
        if place != DEVICE:
            raise Fault(f"it keeps nothing that lies on {place}")
        return
    state.grouped.place = state.grouped.place or place
    if place != state.grouped.place:
        raise Fault(f"it keeps on {place} what others keep on {state.grouped.place}")
    if not is_on_device(instruction):
        kept = (v for v in instruction.results if v.kind is ValueKind.KEPT)
        state.grouped.keepers.append((*instruction.inputs, *kept))


def check_leave(state: State, instruction: Leave) -> None:
    """What the instruction of its number keeps leaves the device.

    Raises:
        Fault: not so.
    """
    keepers = state.grouped.keepers
    if not 0 <= instruction.number < len(keepers):
        raise Fault(f"nothing is kept elsewhere as number {instruction.number}")
    for value in instruction.inputs:
        state.there(value)
        if value in state.program.given or value in state.program.returned:
            raise Fault(f"{value.name} belongs to the caller")
        last = max((k for k, own in enumerate(keepers) if value in own), default=None)
        if last != instruction.number:
            raise Fault(f"{value.name} is not what is kept as number {instruction.number}")
        state.away.add(value)


def check_fetch(state: State, instruction: Fetch) -> None:
    """What comes back has left.

    Raises:
        Fault: it has not.
    """
    for value in instruction.inputs:
        if value not in state.held or value not in state.away:
            raise Fault(f"{value.name} has not left")
        state.away.remove(value)
