"""What the same step needs unstreamed: eager, and with gradient checkpointing of each layer.

Built from the graph that the schedule was made for: forward and VJP of each segment, run whole, as explicit
graphs. What such a graph makes in its forward half and reads in its backward half is what autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ..passes.cost.program import ProgramCost, largest
from ..passes.graph.facts import Segment
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
        checkpointing: segments that read along the sequence keep their inputs only and run again in the
            backward, as Hugging Face's gradient checkpointing does with decoder layers.
    """
    segments = cost.facts.segments
    kept = [_kept(cost, s, sizes, checkpointing) for s in segments]
    moments = []
    held: Any = 0
    for segment, own in zip(segments, kept, strict=True):
        running = own if cost.facts.trains(segment) else _running(cost, segment, sizes)
        moments.append(UnstreamedMoment("forward", segment.index, held + running))
        held = held + own
    for segment, own in zip(reversed(segments), reversed(kept), strict=True):
        if not cost.facts.trains(segment):
            continue
        running = _running(cost, segment, sizes)
        again = checkpointing and bool(segment.mixings)
        moments.append(UnstreamedMoment("backward", segment.index, held + running - (0 if again else own)))
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
    again = [s for s in cost.facts.segments if checkpointing and s.mixings and cost.facts.trains(s)]
    once = [_cost(cost, s) for s in cost.facts.segments]
    twice = [cost.joint_cost(s, backward=False) for s in again]
    return sum(cost.value(c.flops, sizes) for c in (*once, *twice))


def _cost(cost: StepCost, segment: Segment) -> ProgramCost:
    """Forward and VJP of a segment at once, or the forward alone where there is no gradient."""
    return cost.joint_cost(segment, backward=cost.facts.trains(segment))


def _running(cost: StepCost, segment: Segment, sizes: Sizes) -> Any:
    """Bytes that a segment makes while it runs: forward and VJP, or the forward alone."""
    return _states(cost, segment, sizes) + cost.value(_cost(cost, segment).peak, sizes)


def _kept(cost: StepCost, segment: Segment, sizes: Sizes, checkpointing: bool) -> Any:
    """Bytes that a segment's forward leaves for its backward; without one, for that of others."""
    if not cost.facts.trains(segment):
        readers = [s for s in cost.facts.segments if cost.facts.trains(s)]
        return sum(cost.bytes_of(n, sizes) for n in segment.outputs if any(n in s.rows for s in readers))
    if checkpointing and segment.mixings:
        return sum(cost.bytes_of(n, sizes) for n in segment.rows if n.op != "placeholder")
    kept = cost.joint_cost(segment).kept
    return _states(cost, segment, sizes) + (0 if kept is None else cost.value(kept, sizes))


def _states(cost: StepCost, segment: Segment, sizes: Sizes) -> Any:
    """Keys and values, which are inputs of a streamed program and inner values of an eager one."""
    return sum(cost.bytes_of(s, sizes) for s in cost.states_of(segment))
