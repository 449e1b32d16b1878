"""What the same step needs unstreamed: eager, and with gradient checkpointing of each layer.

The step is a program of its own, `passes.s6_schedule.as_eager`. Forward and VJP of a segment that runs at
once are explicit graphs: what such a graph makes in its forward half and reads in its backward half is what
autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ..passes.cost.program import ProgramCost, largest
from ..passes.cost.work import Work, total
from ..passes.graph.facts import Segment
from ..passes.s6_schedule.as_eager import as_eager
from ..passes.s6_schedule.program import Differentiate, RunPart, StepInstruction
from ..passes.s6_schedule.program.values import Value, ValueKind
from .held_bytes import Sizes
from .step import StepCost


@dataclass(frozen=True)
class UnstreamedMoment:
    """One point of an unstreamed step: the phase, the segment that runs, and all bytes held."""

    phase: str
    segment: int
    total: Any


def timeline(cost: StepCost, sizes: Sizes, checkpointing: bool) -> list[UnstreamedMoment]:
    """The step without streaming, segment by segment; bytes over weights, gradients and inputs.

    Args:
        cost: cost of the streamed step of the same graph.
        sizes: the sizes, as numbers or symbols.
        checkpointing: segments that read along the sequence run again in the backward.
    """
    program, moments = as_eager(cost.executor.parts, checkpointing), []
    held: Any = 0
    read = {v for i in program.backward for v in i.inputs}
    kept: dict[int, Any] = {}
    for instruction in program.forward:
        segment = _segment(cost, instruction)
        kept[segment.index] = own = _kept(cost, instruction, read, sizes)
        running = own if cost.facts.trains(segment) else _running(cost, segment, sizes)
        moments.append(UnstreamedMoment("forward", segment.index, held + running))
        held = held + own
    for instruction in program.backward:
        segment = _segment(cost, instruction)
        own = kept[segment.index]
        running = _running(cost, segment, sizes) - (own if _saved(instruction.inputs) else 0)
        moments.append(UnstreamedMoment("backward", segment.index, held + running))
        held = held - own
    return moments


def peak_expression(cost: StepCost, checkpointing: bool) -> sympy.Expr:
    """Peak bytes of the unstreamed step as an expression in T and the symbols of other sizes."""
    return sympy.Max(*largest(sympy.sympify(m.total) for m in timeline(cost, cost.symbols, checkpointing)))


def flops(cost: StepCost, sizes: Sizes, checkpointing: bool = False) -> Any:
    """Floating-point operations of the eager step: each forward and each VJP once.

    Args:
        cost, sizes: as of `timeline`.
        checkpointing: layers run forwards a second time.
    """
    return work(cost, sizes, checkpointing).flops


def work(cost: StepCost, sizes: Sizes, checkpointing: bool = False) -> Work:
    """What the eager step computes and moves; see `flops`."""
    instructions = as_eager(cost.executor.parts, checkpointing).instructions()
    return total(_work(cost, instruction, sizes) for instruction in instructions)


def _work(cost: StepCost, instruction: StepInstruction, sizes: Sizes) -> Work:
    """Of a forward, or of a derivative with the forward before it: also of one that has saved something."""
    segment, forward = _segment(cost, instruction), isinstance(instruction, RunPart)
    if forward and _saved(instruction.results):
        return Work()
    return cost.work(cost.joint_cost(segment, backward=not forward), sizes)


def _segment(cost: StepCost, instruction: StepInstruction) -> Segment:
    assert isinstance(instruction, RunPart | Differentiate) and instruction.segment is not None
    return cost.facts.segments[instruction.segment]


def _saved(values: tuple[Value, ...]) -> bool:
    """True if what autograd saves is among them."""
    return any(v.kind is ValueKind.KEPT for v in values)


def _cost(cost: StepCost, segment: Segment) -> ProgramCost:
    """Forward and VJP of a segment at once, or the forward alone where there is no gradient."""
    return cost.joint_cost(segment, backward=cost.facts.trains(segment))


def _running(cost: StepCost, segment: Segment, sizes: Sizes) -> Any:
    """Bytes that a segment makes while it runs: forward and VJP, or the forward alone."""
    return _states(cost, segment, sizes) + cost.value(_cost(cost, segment).peak, sizes)


def _kept(cost: StepCost, instruction: StepInstruction, read: set[Value], sizes: Sizes) -> Any:
    """Bytes that a segment's forward leaves for the backward, its own or, if it has none, that of others.

    Args:
        read: what the backward reads.
    """
    segment = _segment(cost, instruction)
    if not cost.facts.trains(segment):
        made = (v.node for v in instruction.results if v in read)
        return sum(cost.bytes_of(n, sizes) for n in made if n is not None)
    if not _saved(instruction.results):
        return sum(cost.bytes_of(n, sizes) for n in segment.rows if n.op != "placeholder")
    kept = cost.joint_cost(segment).kept
    return _states(cost, segment, sizes) + (0 if kept is None else cost.value(kept, sizes))


def _states(cost: StepCost, segment: Segment, sizes: Sizes) -> Any:
    """Keys and values, which are inputs of a streamed program and inner values of an eager one."""
    return sum(cost.bytes_of(s, sizes) for s in cost.states_of(segment))
