"""calls: what a step hands to procedures of segments, and takes from them, is what they say."""

from __future__ import annotations

from torch.fx import Node

from ...graph.facts import Reach, shape_of
from ...step.faults import Fault
from ...step.instructions import Buffer, BufferKind
from ...step.way import is_half
from ..program import Call, CallLoss, ChunksFirst, read_from_outside
from ..program.values import Value, ValueKind
from .operands import (
    agree,
    are,
    are_gradients,
    cotangent_written_over,
    is_lent,
    made_by,
    read_by,
)
from .parts import is_the_epilogue
from .step_state import State, run

BACKWARD = ("backward", "scaling")


def check_call(state: State, instruction: Call) -> None:
    """It reads and makes what its procedure does, in the way of its segment; what it writes over is spoiled.

    Raises:
        Fault: not so.
    """
    allowed = BACKWARD if state.part == "backward" and state.within is None else ("forward",)
    if instruction.procedure_name not in allowed:
        raise Fault(f"{instruction.procedure_name!r} is no procedure to be called here")
    _begins(state, instruction)
    if instruction.procedure_name == "scaling":
        _scaling(state, instruction)
    else:
        _operands(state, instruction)
    _writes_over(state, instruction)
    run(state, instruction)
    _spoils(state, instruction)


def check_call_loss(state: State, instruction: CallLoss) -> None:
    """The head is the last segment; the loss is what the epilogue makes of its rows.

    Raises:
        Fault: not so.
    """
    part, segment = instruction.part, state.segment(instruction.segment)
    is_the_epilogue(state, part)
    if instruction.procedure_name != "loss" or segment is not state.facts.segments[-1]:
        raise Fault("only the last segment is the head of a loss")
    _begins(state, instruction)
    found = [k for k, n in enumerate(part.outputs) if n in state.facts.needs_grad]
    if found != [instruction.position] or shape_of(part.outputs[found[0]]) != ():
        raise Fault(f"the loss is not at position {instruction.position} of what it makes")
    if instruction.way.half != is_half(segment):
        raise Fault("gradients are to be normalized where there is float16, and only there")
    more = state.values(n for n in part.inputs if n not in segment.outputs)
    names = [b.name for b in instruction.procedure.parameters]
    are(instruction.inputs, (*read_by(state, instruction), *more), "reads", names)
    made = state.values(n for n in part.outputs if n not in part.inputs)
    unscaled = (v for v in made_by(state, instruction) if v.kind is ValueKind.UNSCALED)
    are(instruction.results, (*made, *unscaled), "makes")
    _writes_over(state, instruction)
    run(state, instruction)
    _spoils(state, instruction)


def check_chunks_first(state: State, instruction: ChunksFirst) -> None:
    """Each segment takes what the one before it hands on, and reads nothing else that does not come in.

    Raises:
        Fault: one does not.
    """
    backward = state.part == "backward"
    if backward:
        _is_run_again(state, instruction)
    lent = _lent(state, instruction) if backward else None
    rows, gradients = (BufferKind.OUTPUT, BufferKind.ROWS), (BufferKind.GRADIENT, BufferKind.COTANGENT)
    _chain(state, instruction, instruction.again, "again", rows, None)
    name, kinds = ("backward", gradients) if backward else ("forward", rows)
    left = _chain(state, instruction, instruction.body, name, kinds, lent)
    if left is not None:
        raise Fault(f"nobody takes what {left.name} hands on")
    are(instruction.inputs, read_from_outside((*instruction.body, *instruction.again)), "reads")
    are(instruction.results, (v for call in instruction.body for v in call.results), "makes")
    run(state, instruction)
    for call in instruction.body:
        _spoils(state, call)
    if not backward:
        state.chains[instruction.body[0].segment] = instruction


def _begins(state: State, call: Call, within: ChunksFirst | None = None) -> None:
    """It is the forward of its segment, or fits the one that there was.

    Raises:
        Fault: not so.
    """
    if state.segment(call.segment).reach is Reach.FULL and not call.way.full:
        raise Fault("its rows read all rows, and it is run as if they did not")
    if call.procedure_name in BACKWARD:
        before = state.ran.get(call.segment)
        if isinstance(before, CallLoss) is not (call.procedure_name == "scaling"):
            raise Fault("this is not the backward of what was run")
        if isinstance(before, ChunksFirst) is not (within is not None):
            raise Fault("its forward is not a loop over the same segments")
        agree(state, call)
        if state.grouped.needed_again(call.segment):
            raise Fault("what its group has not kept is not made again")
        state.gradients.differentiate(call.segment)
        return
    if state.part == "forward":
        state.ran[call.segment] = within or call
    agree(state, call)


def _operands(state: State, call: Call, lent: Value | None = None) -> None:
    names = [b.name for b in call.procedure.parameters]
    are(call.inputs, read_by(state, call, lent), "reads", names)
    are_gradients(call.results, made_by(state, call), call.segment)


def _scaling(state: State, call: Call) -> None:
    """It reads the gradients that the call of the loss has made, and that of the loss."""
    before = state.ran.get(call.segment)
    assert isinstance(before, CallLoss)
    loss = Value(ValueKind.GRADIENT, before.part.outputs[before.position])
    expected = made_by(state, call)
    unscaled = (Value(ValueKind.UNSCALED, v.node, call.segment) for v in expected)
    are(call.inputs, (*unscaled, loss), "reads", [b.name for b in call.procedure.parameters])
    are_gradients(call.results, expected, call.segment)


# ---- memory


def _writes_over(state: State, call: Call) -> None:
    """It writes over nothing that somebody else may hold, or that is of another form.

    Raises:
        Fault: it does.
    """
    for buffer in call.way.overwrites:
        if buffer not in call.procedure.parameters:
            raise Fault(f"it writes over {buffer.name}, which it is not given")
        if isinstance(call, CallLoss):
            _is_its_own(state, call, buffer)
        elif call.procedure_name != "backward" or not _is_cotangent(state, call, buffer):
            raise Fault(f"{buffer.name} may not be written over")


def _is_cotangent(state: State, call: Call, buffer: Buffer) -> bool:
    own = state.segment(call.segment)
    node = cotangent_written_over(state.facts, own, own)
    return buffer.kind is BufferKind.COTANGENT and node is not None and _twin(state, call, buffer) is node


def _is_its_own(state: State, call: CallLoss, buffer: Buffer) -> None:
    """Rows of a loss that a procedure has written into memory of its own."""
    value = Value(ValueKind.CAPTURED, _twin(state, call, buffer))
    maker = state.made_by.get(value)
    fresh = isinstance(maker, Call) and not state.segment(maker.segment).chained
    gradient = Buffer(BufferKind.GRADIENT, buffer.node) in call.procedure.results
    whole = not state.segment(call.segment).removed
    if not (buffer.kind is BufferKind.ROWS and fresh and gradient and whole):
        raise Fault(f"{buffer.name} may not be written over")
    if value in state.program.returned:
        raise Fault(f"{buffer.name} is returned, and written over")


def _twin(state: State, call: Call, buffer: Buffer) -> Node | None:
    return None if buffer.node is None else state.twins(call).get(buffer.node)


def _spoils(state: State, call: Call) -> None:
    taken = call.way.overwrites
    pairs = zip(call.procedure.parameters, call.inputs, strict=False)
    state.spoiled |= {v for b, v in pairs if b in taken and v in state.held}


# ---- several segments together


def _is_run_again(state: State, loop: ChunksFirst) -> None:
    """Chunks go forwards through the segments of the forward's loop, and back from the last one."""
    ran = [call.segment for call in loop.again]
    forward = state.chains.get(ran[0]) if ran else None
    if forward is None or ran != [call.segment for call in forward.body]:
        raise Fault("these are not the segments of a loop of the forward")
    back = [call.segment for call in loop.body][::-1]
    if not back or ran[len(ran) - len(back) :] != back:
        raise Fault("segments do not run backwards in the reverse order")


def _lent(state: State, loop: ChunksFirst) -> Value | None:
    """The gradient of what goes out, which is read before that of what comes in is written."""
    first, last = (state.segment(loop.again[k].segment) for k in (0, -1))
    node = cotangent_written_over(state.facts, first, last)
    return None if node is None or len(loop.again) < 2 else Value(ValueKind.GRADIENT, node)


def _chain(
    state: State,
    loop: ChunksFirst,
    calls: tuple[Call, ...],
    name: str,
    kinds: tuple[BufferKind, BufferKind],
    lent: Value | None,
) -> Buffer | None:
    """Calls one after the other: each takes what is handed to it.

    Returns:
        What the last one hands on.

    Raises:
        Fault: one does not.
    """
    gives, takes = kinds
    handed: tuple[Node | None, Buffer] | None = None
    for k, call in enumerate(calls):
        if call.procedure_name != name or isinstance(call, CallLoss) or call.way.together is None:
            raise Fault(f"{call.procedure_name!r} of segment {call.segment} is not run in such a loop")
        _joins(state, loop, call, lent if k == len(calls) - 1 else None)
        passing = call.procedure.passing
        taken = [_twin(state, call, b) for b in passing if b.kind is takes]
        if taken != ([] if handed is None else [handed[0]]):
            raise Fault(f"segment {call.segment} does not take what is handed to it")
        given = [(_twin(state, call, b), b) for b in passing if b.kind is gives]
        handed = given[0] if given else None
    return None if handed is None or name == "again" else handed[1]


def _joins(state: State, loop: ChunksFirst, call: Call, lent: Value | None) -> None:
    """A call within a loop over several segments; it writes over nothing but what is lent to it."""
    if call.procedure_name == "again":
        agree(state, call)
    else:
        _begins(state, call, within=loop)
    if not call.way.overwrites <= {b for b in call.procedure.parameters if is_lent(call, b)}:
        raise Fault(f"segment {call.segment} writes over what is not lent to it")
    _operands(state, call, lent)
