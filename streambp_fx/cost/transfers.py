"""transfers: bytes of a step that go elsewhere and come back, by what the step program says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..passes.s6_schedule.offloading import moved
from ..passes.s6_schedule.program import Call, unrolled
from ..passes.step.instructions import BufferKind, Scale
from .step import Sizes, StepCost
from .step_walk import StepWalk

MADE = (BufferKind.OUTPUT, BufferKind.GRADIENT)


@dataclass(frozen=True)
class Transfers:
    """Bytes of one step on one device: numbers or expressions, as the sizes are.

    Attributes:
        out: that leave for where there is more room.
        back: that come to the device from there.
    """

    out: Any = 0
    back: Any = 0


def transfers(cost: StepCost, sizes: Sizes) -> Transfers:
    """What one step moves.

    What is kept for the backward leaves once and comes back once. Rows that lie elsewhere all the time leave
    once, where they are made, and come back for each program that reads them, see NOTE [rows elsewhere].

    Args:
        cost: of the step; its policy says what lies elsewhere.
        sizes: of the step.
    """
    program = cost.step_of(sizes)
    walk = StepWalk(cost, program, sizes)
    out = back = sum(walk.bytes_of(value) for value in moved(program))
    for call in (*unrolled(program.forward), *unrolled(program.backward)):
        if not isinstance(call, Call) or not call.way.elsewhere:
            continue
        own = {b: walk.bytes_of(v) for b, v in call.bindings().items() if b in call.way.elsewhere}
        out += sum(size for b, size in own.items() if b.kind in MADE)
        scaled = [i.buffer for i in call.procedure.body if isinstance(i, Scale)]
        read = (b for _, run in call.procedure.runs() for b in run.inputs)
        back += sum(own.get(b, 0) for b in (*read, *scaled))
    return Transfers(out, back)
