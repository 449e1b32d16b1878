"""gradients: from what the caller gives to what the caller is given, and what is let go in between."""

from __future__ import annotations

from torch.fx import Node

from ...graph.facts import Kind, tensors_of
from ...step.faults import Fault
from ..program import Add, Drop, HandOver, Return, Seed, StepProgram, SumShares, Zeros
from ..program.values import CALLER, Value, ValueKind
from .operands import are, are_gradients
from .step_state import State


def check_promises(program: StepProgram) -> None:
    """What is given, returned and shared are values of the graph.

    Raises:
        Fault: not so.
    """
    facts = program.facts
    for value in program.given:
        node = value.node
        there = (
            value.kind is ValueKind.CAPTURED and node is not None and node.op in ("placeholder", "get_attr")
        )
        if not there or node is None or facts.kinds[node] is Kind.SIZE:
            raise Fault(f"{value.name} is nothing that the caller has")
    lazy = [v.node for v in program.returned if v.kind is ValueKind.LAZY]
    results = dict.fromkeys(n for n in facts.results if isinstance(n, Node) and tensors_of(n))
    at_once = [Value(ValueKind.CAPTURED, n) for n in results if n not in lazy]
    are(program.returned, [*at_once, *(Value(ValueKind.LAZY, n) for n in lazy)], "returns")
    if not {*results, *facts.lazy.values()}.issuperset(lazy):
        raise Fault("what is computed when it is read is no result")


def check_return(state: State, instruction: Return) -> None:
    """All that is promised is returned, once and in order.

    Raises:
        Fault: it is not.
    """
    for value in instruction.inputs:
        state.read(value)
        if value in state.returned:
            raise Fault(f"{value.name} is returned twice")
        state.returned.add(value)
    are(instruction.inputs, state.program.returned, "returns")


def check_seed(state: State, instruction: Seed) -> None:
    """Gradients of what was returned come from the caller, that of the loss among them.

    Raises:
        Fault: not so.
    """
    returned = {v.node for v in state.returned}
    for value in instruction.results:
        if value.node not in returned or value.node not in state.facts.needs_grad:
            raise Fault(f"{value.name}: the caller was not given what it is the gradient of")
        state.make(value, instruction)
    whole = (Value(ValueKind.GRADIENT, v.node) for v in instruction.results)
    are_gradients(instruction.results, whole, CALLER)
    captured = (v.node for v in state.program.returned if v.kind is ValueKind.CAPTURED)
    numbers = [n for n in captured if n in state.facts.needs_grad and n is not None and _is_number(n)]
    if len(numbers) == 1 and numbers[0] not in {v.node for v in instruction.results}:
        raise Fault("the gradient of the loss does not come from the caller")


def _is_number(node: Node) -> bool:
    return tensors_of(node)[0].dim() == 0


def check_zeros(state: State, instruction: Zeros) -> None:
    """To what a segment makes there may come no gradient: if nobody else makes one.

    Raises:
        Fault: somebody does.
    """
    outputs = {n for s in state.facts.segments for n in s.outputs}
    for value in instruction.results:
        ours = value.node in outputs and value.node in state.facts.needs_grad
        if value != Value(ValueKind.GRADIENT, value.node) or not ours:
            raise Fault(f"{value.name} is no gradient of what a segment makes")
        if value.node in state.gradients.made:
            raise Fault(f"a gradient that is not zero comes to {value.name}")
        state.make(value, instruction)


def check_add(state: State, instruction: Add) -> None:
    """A part of a gradient begins it, or is added to it.

    Raises:
        Fault: it is no part of it, or there is something else to be added to.
    """
    if len(instruction.inputs) not in (1, 2) or len(instruction.results) != 1:
        raise Fault("a part is added to what there is, and to nothing else")
    part, (total,) = instruction.inputs[-1], instruction.results
    whole = Value(ValueKind.GRADIENT, part.node)
    if part.kind is not ValueKind.GRADIENT or part.segment is None or total != whole:
        raise Fault(f"{part.name} is no part of {total.name}")
    state.there(part)
    if len(instruction.inputs) > 1:
        state.there(instruction.inputs[0])
        if instruction.inputs[0] != total:
            raise Fault(f"the sum is {total.name}, and {instruction.inputs[0].name} is added to")
    else:
        state.make(total, instruction)
    state.let_go(part)
    state.made_by[total] = instruction
    state.gradients.to_add[total] -= 1


def check_sum_shares(state: State, instruction: SumShares) -> None:
    """Shares are summed when they are complete, once.

    Raises:
        Fault: not so.
    """
    for value in instruction.inputs:
        state.there(value)
        state.complete(value)
        if value in state.gradients.whole:
            raise Fault(f"{value.name} is summed twice")
        state.gradients.whole.add(value)


def check_hand_over(state: State, instruction: HandOver) -> None:
    """What the caller is promised is complete when it is handed over, and is handed over once.

    Raises:
        Fault: not so.
    """
    shared = state.shared
    for value in instruction.inputs:
        state.read(value)
        if value not in state.program.gradients:
            raise Fault(f"{value.name} is not what the caller is promised")
        if value in state.gradients.handed_over:
            raise Fault(f"{value.name} is handed over twice")
        group = shared.group_of.get(Value(ValueKind.CAPTURED, value.node))
        if group is not None and group not in shared.gathered:
            raise Fault(f"{value.name} comes after its parameter was given back")
        if shared.shares and value not in state.gradients.whole:
            raise Fault(f"{value.name} is this device's share, and is not summed")
        state.gradients.handed_over.add(value)
        state.let_go(value)


def check_drop(state: State, instruction: Drop) -> None:
    """Nothing is let go that somebody must still read.

    Raises:
        Fault: something is.
    """
    for value in instruction.inputs:
        if value in state.program.given or value in state.program.returned:
            raise Fault(f"{value.name} belongs to the caller")
        if value.kind is ValueKind.UNSCALED:
            raise Fault(f"{value.name} is dropped before it is scaled")
        state.complete(value)
        if value in state.unread:
            raise Fault(f"{value.name} is dropped, and nobody has read it")
        state.let_go(value)
