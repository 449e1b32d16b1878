"""move_what_is_kept: what the backward reads of the forward leaves the device in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .program import (
    Call,
    CallLoss,
    Fetch,
    Group,
    Leave,
    RunPart,
    StepInstruction,
    StepProgram,
    flat,
    segment_of,
    unrolled,
)
from .program.values import DEVICE, Value, ValueKind
from .rows_elsewhere import rows_elsewhere
from .step_parts import StepParts


def move_what_is_kept(program: StepProgram, parts: StepParts) -> StepProgram:
    """What the backward reads of the forward leaves the device and comes back, see `policy`.

    While a segment runs, what the one before has kept is on its way; in the backward, what the next one
    reads. Parameters, and what all segments read, stay.
    """
    if not parts.moves or not program.backward:
        return program
    keepers = [i for i in program.forward if isinstance(i, Group) or _is_kept_of(i)]
    leaving = _leaving(program, keepers)
    forward: list[StepInstruction] = []
    number = 0
    for place, instruction in enumerate(program.forward):
        rest = program.forward[place:]
        if any(instruction is k for k in keepers):
            forward += _left(leaving, number - 2, rest)
            forward.append(replace(instruction, place=parts.policy.offload))  # type: ignore[call-arg]
            number += 1
            continue
        if isinstance(instruction, CallLoss):  # where memory is scarcest
            forward += [*_left(leaving, number - 2, rest), *_left(leaving, number - 1, rest)]
        forward.append(instruction)
    gone = {v for i in forward if isinstance(i, Leave) for v in i.inputs}
    return program.with_parts(forward, _fetched(program.backward, keepers, leaving, gone))


def _is_kept_of(instruction: StepInstruction) -> bool:
    if isinstance(instruction, RunPart):
        return instruction.segment is not None
    return isinstance(instruction, Call) and not isinstance(instruction, CallLoss)


def moved(program: StepProgram) -> tuple[Value, ...]:
    """Values that lie elsewhere between forward and backward."""
    keepers = [i for i in unrolled(program.forward) if getattr(i, "place", DEVICE) != DEVICE]
    return tuple(v for own in _leaving(program, keepers) for v in own)


def _leaving(program: StepProgram, keepers: list[StepInstruction]) -> list[tuple[Value, ...]]:
    """What each keeps, but for what a later one keeps as well."""
    stay = {*program.given, *(v for i in program.prologue for v in i.results), *rows_elsewhere(program)}
    read = {v for i in unrolled(program.backward) for v in i.inputs}
    found: list[tuple[Value, ...]] = []
    later: set[Value] = set()
    for keeper in reversed(keepers):
        kept = [v for v in keeper.results if v.kind is ValueKind.KEPT]
        own = dict.fromkeys(v for v in (*keeper.inputs, *kept) if v in read and v not in stay)
        found.append(tuple(v for v in own if v not in later))
        later.update(own)
    return found[::-1]


def _left(
    leaving: list[tuple[Value, ...]], number: int, rest: Sequence[StepInstruction]
) -> list[StepInstruction]:
    """What one keeper keeps leaves, but for what the rest of the forward still reads."""
    if number < 0 or not leaving[number]:
        return []
    needed = {v for i in rest for v in i.inputs}
    found = tuple(v for v in leaving[number] if v not in needed)
    return [Leave(inputs=found, number=number)] if found else []


def _fetched(
    backward: tuple[StepInstruction, ...],
    keepers: list[StepInstruction],
    leaving: list[tuple[Value, ...]],
    gone: set[Value],
) -> Iterator[StepInstruction]:
    number_of = {s: k for k, keeper in enumerate(keepers) for s in _segments_of(keeper)}
    back: set[Value] = set()
    begun: set[int] = set()
    for instruction in backward:
        segment = segment_of(instruction)
        number = None if segment is None else number_of.get(segment)
        for k in (number, number - 1) if number is not None and number not in begun else ():
            own = tuple(v for v in leaving[k] if v in gone and v not in back) if k >= 0 else ()
            back.update(own)
            yield from [Fetch(inputs=own)] if own else []
        begun |= set() if number is None else {number}
        yield instruction


def _segments_of(instruction: StepInstruction) -> list[int]:
    return [s for s in map(segment_of, flat([instruction])) if s is not None]
