"""as_eager: the same step as PyTorch runs it, segment by segment; it is counted, never run."""

from __future__ import annotations

from dataclasses import replace

from ..graph.facts import Facts, Kind
from .program import Differentiate, RunPart, StepInstruction, StepProgram
from .program.values import Value, ValueKind
from .step_parts import StepParts


def as_eager(parts: StepParts, checkpointing: bool) -> StepProgram:
    """The step of a graph without streaming: each segment, and in the backward its derivative.

    Args:
        parts: of the streamed step of the same graph.
        checkpointing: segments that read along the sequence keep their inputs only and run again in the
            backward, as Hugging Face's gradient checkpointing does with decoder layers. The others, or all
            without it, keep what autograd saves: a result of kind `KEPT`, which their backward reads.
    """
    facts = parts.facts
    forward: list[StepInstruction] = []
    backward: list[StepInstruction] = []
    for segment in facts.segments:
        part, trains = parts.unchunked_form(segment), facts.trains(segment)
        read = tuple(Value(ValueKind.CAPTURED, n) for n in part.inputs if facts.kinds[n] is not Kind.SIZE)
        made = tuple(Value(ValueKind.CAPTURED, n) for n in segment.outputs)
        saves = trains and not (checkpointing and segment.mixings)
        kept = (Value(ValueKind.KEPT, segment=segment.index),) if saves else ()
        run = RunPart(part=part, name="segment", segment=segment.index, inputs=read, results=(*made, *kept))
        forward.append(run)
        if trains:
            come, go = _gradients(facts, made), _gradients(facts, read)
            own = Differentiate(part=part, name="segment", segment=segment.index, results=go)
            backward.append(replace(own, inputs=(*come, *read, *kept)))
    return StepProgram(facts, (), (), (), (), tuple(forward), tuple(reversed(backward)))


def _gradients(facts: Facts, values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(Value(ValueKind.GRADIENT, v.node) for v in values if v.node in facts.needs_grad)
