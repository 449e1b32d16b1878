"""operands: which values a call of a segment reads and makes, and in which way it is run.

Identical segments share procedures, whose buffers are nodes of one of them. What such a node is in another
segment follows from its place: the operands of a call are compared one by one with what they must be.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from ...graph.facts import Facts, Segment, shape_of, tensors_of
from ...s3_cut.alive_bytes import row_axis
from ...step.faults import Fault
from ...step.instructions import Buffer, BufferKind
from ...step.way import Way
from ..program import Call, CallLoss, ChunksFirst, StepInstruction
from ..program.values import Value, ValueKind
from .step_state import State

CAPTURED = (BufferKind.ROWS, BufferKind.CONSTANT, BufferKind.WHOLE, BufferKind.OUTPUT)
GRADIENTS = (BufferKind.GRADIENT, BufferKind.SUM)
#: What forward and backward of a segment have in common, whatever is written over what.
COMMON = {
    "full": "reads of all rows",
    "left_out": "rows that are left out",
    "half": "float16",
    "several": "rows of several devices",
    "together": "neighbours",
    "keeps_states": "states that are kept",
}


def read_by(state: State, call: Call, lent: Value | None = None) -> tuple[Value, ...]:
    """What the parameters of its procedure are.

    Args:
        lent: a gradient that the loop around it has read, and over which a call may write.

    Raises:
        Fault: it reads such a gradient, and none is lent.
    """
    found = []
    for buffer in call.procedure.parameters:
        if is_lent(call, buffer) and lent is None:
            raise Fault(f"{buffer.name} is no gradient of what it makes")
        found.append(lent if is_lent(call, buffer) and lent is not None else _value(state, call, buffer))
    return tuple(found)


def is_lent(call: Call, buffer: Buffer) -> bool:
    """True for the gradient of something else than what a segment makes."""
    return buffer.kind is BufferKind.COTANGENT and buffer.node not in call.programs.segment.outputs


def made_by(state: State, call: Call) -> tuple[Value, ...]:
    """What the results of its procedure are; of gradients, the whole ones."""
    return tuple(_value(state, call, b) for b in call.procedure.results)


def _value(state: State, call: Call, buffer: Buffer) -> Value:
    if buffer.kind is BufferKind.KEPT:
        return Value(ValueKind.KEPT, segment=call.segment)
    assert buffer.node is not None
    node = state.twins(call)[buffer.node]
    if buffer.kind in CAPTURED:
        return Value(ValueKind.CAPTURED, node)
    if buffer.kind is BufferKind.STATE:
        return Value(ValueKind.STATE, node)
    of_loss = isinstance(call, CallLoss)
    if buffer.kind is BufferKind.COTANGENT:
        return Value(ValueKind.COEFFICIENTS if of_loss else ValueKind.GRADIENT, node)
    if buffer.kind in GRADIENTS and of_loss:
        return Value(ValueKind.UNSCALED, node, call.segment)
    return Value(ValueKind.GRADIENT, node)


def are(found: Iterable[Value], expected: Iterable[Value], what: str, names: Iterable[str] = ()) -> None:
    """Values are those that must be there, in this order.

    Args:
        what: they are, for people: "reads".
        names: what they stand for, as far as they stand for a buffer.

    Raises:
        Fault: one is another.
    """
    found, expected, names = list(found), list(expected), list(names)
    for k, (own, other) in enumerate(zip(found, expected, strict=False)):
        if own != other:
            stands = f"the procedure has {names[k]}" if k < len(names) else f"it {what} {other.name}"
            raise Fault(f"{own.name} stands where {stands}")
    if len(found) != len(expected):
        raise Fault(f"it {what} {len(expected)} values, not {len(found)}")


def are_gradients(found: Iterable[Value], expected: Iterable[Value], by: int) -> None:
    """Results are gradients of these values: all of each, or the part of the one that makes it.

    Raises:
        Fault: one is another.
    """
    found = list(found)
    parts = {v for v in found if v.kind is ValueKind.GRADIENT and v.segment == by}
    are((Value(v.kind, v.node) if v in parts else v for v in found), expected, "makes")


def agree(state: State, call: Call) -> None:
    """A call runs its segment in the way in which it was run before, and others are.

    Raises:
        Fault: not so.
    """
    state.all_ways = state.all_ways or call.way
    for name in ("left_out", "several"):
        if getattr(call.way, name) != getattr(state.all_ways, name):
            raise Fault(f"not all calls have the same {COMMON[name]}")
    before = state.ran.get(call.segment)
    way = _way_of(before, call.segment)
    if way is None:
        raise Fault(f"no forward of segment {call.segment} has come")
    different = [words for name, words in COMMON.items() if getattr(way, name) != getattr(call.way, name)]
    if way.together is None and way.saves != call.way.saves:
        different.append("values that are saved")
    if different:
        raise Fault(f"its forward is run with other {different[0]}")


def _way_of(instruction: StepInstruction | None, segment: int) -> Way | None:
    if isinstance(instruction, ChunksFirst):
        return next((c.way for c in instruction.body if c.segment == segment), None)
    return instruction.way if isinstance(instruction, Call) else None


def cotangent_written_over(facts: Facts, first: Segment, last: Segment) -> Node | None:
    """The output of `last` over whose gradient that of the rows of `first` may be written; None if none may.

    There is one of either, they have the same form, and the caller does not have that gradient.
    """
    rows = [n for n in first.rows if n in facts.needs_grad]
    outputs = [n for n in last.outputs if n in facts.needs_grad]
    if len(rows) != 1 or len(outputs) != 1 or outputs[0] in facts.outputs:
        return None
    forms = [(tensors_of(n)[0].dtype, shape_of(n), row_axis(facts, n)) for n in (*rows, *outputs)]
    return outputs[0] if forms[0] == forms[1] else None
