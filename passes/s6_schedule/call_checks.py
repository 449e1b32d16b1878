"""call_checks: what a step hands to procedures of segments, and takes from them, is what they say."""

from __future__ import annotations

from ..graph.facts import shape_of
from ..step.instructions import Buffer, BufferKind
from .program import Call, CallLoss, ChunksFirst
from .program.values import Value, ValueKind
from .step_state import Fault, State, run


def check_call(state: State, instruction: Call) -> None:
    """What a procedure reads and makes is what it says, and what it writes over is spoiled."""
    _is_called_rightly(state, instruction)
    run(state, instruction)
    taken = instruction.way.overwrites
    pairs = zip(instruction.procedure.parameters, instruction.inputs, strict=False)
    state.spoiled |= {v for b, v in pairs if b in taken and v in state.held}


def _is_called_rightly(state: State, instruction: Call) -> None:
    """Its values are those that the procedure takes and makes."""
    procedure = instruction.procedure
    more = len(instruction.inputs) - len(procedure.parameters)
    scaling = instruction.procedure_name == "scaling"
    if more < 0 or (more and not scaling and not isinstance(instruction, CallLoss)):
        raise Fault(f"the procedure takes {len(procedure.parameters)} values, not {len(instruction.inputs)}")
    for buffer, value in zip(procedure.parameters, instruction.inputs, strict=False):
        _fits(buffer, value, scaling)
    if not isinstance(instruction, CallLoss):
        if len(procedure.results) != len(instruction.results):
            raise Fault(f"the procedure has {len(procedure.results)} results, not {len(instruction.results)}")
        for buffer, value in zip(procedure.results, instruction.results, strict=True):
            _fits(buffer, value, False)
    _saved(state, instruction)


def check_chunks_first(state: State, instruction: ChunksFirst) -> None:
    """Each segment takes what the one before it hands on, and reads nothing else that does not come in.

    Raises:
        Fault: one does not.
    """
    kinds = (BufferKind.OUTPUT, BufferKind.ROWS), (BufferKind.GRADIENT, BufferKind.COTANGENT)
    ways = [(instruction.again, *kinds[0]), (instruction.body, *kinds[bool(instruction.again)])]
    for calls, gives, takes in ways:
        handed: Buffer | None = None
        for call in calls:
            _is_called_rightly(state, call)
            taken = [b for b in call.procedure.passing if b.kind is takes]
            if [shape_of(b.node) for b in taken] != [shape_of(b.node) for b in (handed,) if b is not None]:
                raise Fault(f"segment {call.segment} does not take what is handed to it")
            handed = next((b for b in call.procedure.passing if b.kind is gives), None)
            if not set(instruction.inputs).issuperset(call.inputs):
                raise Fault(f"segment {call.segment} reads what does not come in")
    ran = [call.segment for call in instruction.again]
    back = [call.segment for call in instruction.body][::-1]
    if ran and ran[len(ran) - len(back) :] != back:
        raise Fault("segments do not run backwards in the reverse order")
    if [v for call in instruction.body for v in call.results] != [*instruction.results]:
        raise Fault("it does not make its results")
    run(state, instruction)
    for call in instruction.body:
        pairs = zip(call.procedure.parameters, call.inputs, strict=True)
        state.spoiled |= {v for b, v in pairs if b in call.way.overwrites and v in state.held}


def _saved(state: State, instruction: Call) -> None:
    """What is read of a forward is what that has saved."""
    saves = instruction.way.saves
    for value in (*instruction.inputs, *instruction.results):
        if value.kind is ValueKind.KEPT and state.saves.setdefault(value, saves) != saves:
            raise Fault(f"{value.name} is not what the forward has saved")


#: What a value may be that stands for a buffer.
KINDS = {
    BufferKind.ROWS: {ValueKind.CAPTURED},
    BufferKind.CONSTANT: {ValueKind.CAPTURED},
    BufferKind.WHOLE: {ValueKind.CAPTURED},
    BufferKind.OUTPUT: {ValueKind.CAPTURED},
    BufferKind.COTANGENT: {ValueKind.GRADIENT, ValueKind.COEFFICIENTS},
    BufferKind.KEPT: {ValueKind.KEPT},
    BufferKind.STATE: {ValueKind.STATE},
    BufferKind.SUM: {ValueKind.GRADIENT},
    BufferKind.GRADIENT: {ValueKind.GRADIENT},
}


def _fits(buffer: Buffer, value: Value, unscaled: bool) -> None:
    """A value is of the kind and shape that the procedure takes it to be."""
    kinds = {ValueKind.UNSCALED} if unscaled else KINDS[buffer.kind]
    alike = (buffer.node is None) == (value.node is None)
    if buffer.node is not None and value.node is not None:
        alike = shape_of(buffer.node) == shape_of(value.node)
    if value.kind not in kinds or not alike:
        raise Fault(f"{value.name} stands where the procedure has {buffer.name}")
