"""own_rows: each device runs its own rows of the sequence, and what others read of them is exchanged.

Hidden states, and their gradients, lie on the device whose rows they are. Within segments the procedures
exchange states (NOTE [rows on several devices] in `passes.step.build`). Between segments, what is read whole
is gathered: by segments that run unchunked, by what the loss is made of, by the caller.

NOTE [shares of a gradient]: the gradient that a device computes is that of its own rows: of a parameter, or
of anything else that all rows read, it is a share, and the sum over the devices is the gradient. Shares are
summed once, where a gradient is handed over. What is made of the segments' outputs is computed on all
devices alike; so a gradient that comes from there is no share but the whole, and counts on one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch.fx import Node

from ..graph.facts import Facts
from ..s3_cut.alive_bytes import row_axis
from .program import (
    Again,
    Call,
    CallLoss,
    CollectRows,
    Group,
    HandOver,
    Return,
    RunPart,
    StepInstruction,
    StepProgram,
    SumShares,
)
from .program.values import Value, ValueKind
from .step_parts import StepParts


def share_rows(program: StepProgram, parts: StepParts) -> StepProgram:
    """The step of one of several devices, each of which has some rows of the sequence."""
    made = made_by_rows(parts.facts)
    return program.with_parts(_shared(program.forward, made), _shared(program.backward, made))


def made_by_rows(facts: Facts) -> frozenset[Node]:
    """Values that segments make of which each device has its own rows."""
    made = (n for s in facts.segments for n in s.outputs)
    return frozenset(n for n in made if row_axis(facts, n) is not None)


def _shared(body: Iterable[StepInstruction], made: frozenset[Node]) -> Iterator[StepInstruction]:
    for instruction in body:
        if isinstance(instruction, Group):
            inner, again = (tuple(_shared(b, made)) for b in (instruction.body, instruction.again))
            yield replace(instruction, body=inner, again=again)
            continue
        if isinstance(instruction, Again):
            yield replace(instruction, body=tuple(_shared(instruction.body, made)))
            continue
        read = _read_whole(instruction, made)
        if read:
            yield CollectRows(inputs=read, partial=getattr(instruction, "segment", None) is not None)
        if isinstance(instruction, HandOver):
            yield SumShares(inputs=instruction.inputs)
        if isinstance(instruction, Call):
            instruction = replace(instruction, way=replace(instruction.way, several=True))
        yield instruction


def _read_whole(instruction: StepInstruction, made: frozenset[Node]) -> tuple[Value, ...]:
    """Values by rows of which an instruction of the forward reads all rows."""
    if not isinstance(instruction, RunPart | Return | CallLoss):
        return ()
    by_rows = (v for v in instruction.inputs if v.kind is ValueKind.CAPTURED and v.node in made)
    if isinstance(instruction, CallLoss):  # besides the rows of its head
        own = set(instruction.bindings().values())
        return tuple(v for v in by_rows if v not in own)
    return tuple(by_rows)
