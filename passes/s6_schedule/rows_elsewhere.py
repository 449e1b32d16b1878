"""move_rows: rows between layers, and their gradients, lie elsewhere and come to the device by chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from ..step.instructions import BY_ROWS
from .program import Call, CallLoss, StepInstruction, StepProgram, unrolled
from .program.values import Value, ValueKind
from .step_parts import StepParts


def move_rows(program: StepProgram, parts: StepParts) -> StepProgram:
    """Rows that one segment makes and one other reads, and their gradients, are never all on the device.

    NOTE [rows elsewhere]: what a layer holds of all rows while it runs is its states, which later rows read,
    and rows that come in and go out. Of those a chunk reads and writes its own, once in the forward and once
    or twice in the backward. So they may lie where there is more room. Not so what several read, whose
    gradients would be added up, and what is returned: those are somebody else's as well.
    """
    nodes = _between_two(program)
    if not nodes:
        return program
    place = parts.policy.offload
    bodies = ([_moved(i, nodes, place) for i in body] for body in (program.forward, program.backward))
    return program.with_parts(*bodies)


def rows_elsewhere(program: StepProgram) -> frozenset[Value]:
    """The values that lie elsewhere and come to the device by chunks."""
    calls = (i for i in program.instructions() if isinstance(i, Call))
    return frozenset(v for c in calls for b, v in c.bindings().items() if b in c.way.elsewhere)


def _between_two(program: StepProgram) -> frozenset[Node]:
    """What one streamed segment makes and one other reads, which nobody else does."""
    forward = [*unrolled(program.forward)]
    calls = [i for i in forward if isinstance(i, Call)]
    made = {v for c in calls if not isinstance(c, CallLoss) for v in _rows_of(c, c.results)}
    read = {v for c in calls for v in _rows_of(c, c.inputs)}
    readers = Counter(v for i in forward for v in set(i.inputs))
    alone = {v for v in made & read if readers[v] == 1} - set(program.returned)
    wholly = (i for i in unrolled(program.backward) if not isinstance(i, Call))
    return frozenset(v.node for v in alone.difference(*(i.inputs for i in wholly)) if v.node is not None)


def _rows_of(call: Call, values: Iterable[Value]) -> set[Value]:
    """Of values that a call reads or makes, captured ones that go by rows."""
    by_rows = {v for b, v in call.bindings().items() if b.kind in BY_ROWS}
    return {v for v in values if v.kind is ValueKind.CAPTURED} & by_rows


def _moved(instruction: StepInstruction, nodes: frozenset[Node], place: str) -> StepInstruction:
    """The same with its rows elsewhere."""
    if not isinstance(instruction, Call):
        return instruction
    bound = instruction.bindings().items()
    own = frozenset(b for b, v in bound if b.kind in BY_ROWS and v.node in nodes)
    return (
        replace(instruction, way=replace(instruction.way, elsewhere=own, place=place)) if own else instruction
    )
