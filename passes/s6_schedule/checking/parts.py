"""parts: what runs in ordinary PyTorch reads and makes what its part of the graph does."""

from __future__ import annotations

from ...graph.facts import Segment
from ...graph.subgraph import Subgraph
from ...step.faults import Fault
from ..program import CallLoss, Defer, Differentiate, Linearize, RunPart
from ..program.values import EPILOGUE, Value, ValueKind
from .operands import are, are_gradients
from .step_state import State, run

WHOLE, SEGMENT, LAST, ASKED = "whole values", "segment", "epilogue", "predicates"


def check_run_part(state: State, instruction: RunPart) -> None:
    """It runs the part that it names, in its place.

    Raises:
        Fault: not so.
    """
    part, segment = instruction.part, instruction.segment
    behind = state.part == "forward" and state.within is None
    known = {WHOLE: state.part == "prologue", LAST: behind, ASKED: behind}
    if not known.get(instruction.name, instruction.name == SEGMENT and state.part != "prologue"):
        raise Fault(f"{instruction.name!r} is no part to be run here")
    if (segment is not None) is not (instruction.name == SEGMENT):
        raise Fault("it says that it runs a segment, or does not, and the other is so")
    if instruction.recorded and state.within is None:
        raise Fault("it is recorded, and no group runs it again")
    if segment is not None:
        _is_of_segment(part, state.segment(segment))
        if state.part == "forward":
            state.ran[segment] = instruction
    if instruction.name == LAST:
        is_the_epilogue(state, part)
    if instruction.name == ASKED and not set(part.outputs) <= set(state.facts.asked):
        raise Fault("no branch asks this")
    are(instruction.inputs, state.values(part.inputs), "reads")
    are(instruction.results, state.values(n for n in part.outputs if n not in part.inputs), "makes")
    run(state, instruction)


def check_differentiate(state: State, instruction: Differentiate) -> None:
    """What has run is differentiated, once, with the gradients of all that it has made.

    Raises:
        Fault: not so.
    """
    part, segment = instruction.part, instruction.segment
    if segment is None:
        by = EPILOGUE
        ran = state.epilogue is part and instruction.name == LAST
    else:
        by, before = segment, state.ran.get(segment)
        ran = isinstance(before, RunPart) and before.part is part and instruction.name == SEGMENT
        if state.grouped.needed_again(segment):
            raise Fault("what its group has not kept is not made again")
    if not ran:
        raise Fault("it is not what was run")
    state.gradients.differentiate(by)
    needs_grad = state.facts.needs_grad
    come = (n for n in part.outputs if n in needs_grad and state.gradients.comes(n))
    cotangents = tuple(Value(ValueKind.GRADIENT, n) for n in come)
    if not cotangents:
        raise Fault("no gradient of its outputs is read")
    are(instruction.inputs, (*cotangents, *state.values(part.inputs)), "reads")
    wanted = (Value(ValueKind.GRADIENT, n) for n in part.inputs if n in needs_grad)
    are_gradients(instruction.results, wanted, by)
    run(state, instruction)


def check_linearize(state: State, instruction: Linearize) -> None:
    """The derivative is that of the loss in the rows of the last segment.

    Raises:
        Fault: not so.
    """
    part, segments = instruction.part, state.facts.segments
    is_the_epilogue(state, part)
    heads = [i for i in state.program.calls() if isinstance(i, CallLoss)]
    if not segments or len(heads) != 1:
        raise Fault("there is no loss that takes one sweep")
    (rows,) = segments[-1].outputs
    are(instruction.inputs, state.values(n for n in part.inputs if n is not rows), "reads")
    are(instruction.results, [Value(ValueKind.COEFFICIENTS, rows)], "makes")
    run(state, instruction)


def check_defer(state: State, instruction: Defer) -> None:
    """The output is the one of its position.

    Raises:
        Fault: not so.
    """
    part = instruction.part
    if [state.facts.lazy.get(instruction.position)] != part.outputs:
        raise Fault(f"this is not what is returned at position {instruction.position}")
    are(instruction.inputs, state.values(part.inputs), "reads")
    are(instruction.results, [Value(ValueKind.LAZY, n) for n in part.outputs], "makes")
    run(state, instruction)


def is_the_epilogue(state: State, part: Subgraph) -> None:
    """A part is the epilogue that others take it to be, and makes results of the graph.

    Raises:
        Fault: it is not.
    """
    state.epilogue = state.epilogue or part
    if state.epilogue is not part or not set(part.outputs) <= set(state.facts.results):
        raise Fault("this is not the epilogue")


def _is_of_segment(part: Subgraph, segment: Segment) -> None:
    if part.outputs != segment.outputs:
        raise Fault(f"the part is not segment {segment.index}")
