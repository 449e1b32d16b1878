"""checker: proves of a step program, without running it, that it holds what it reads and loses nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..graph.facts import shape_of
from ..step.instructions import Buffer, BufferKind
from ..step.saving import Piece
from .program import (
    Add,
    Again,
    Call,
    CallLoss,
    ChunksFirst,
    CollectRows,
    Defer,
    Differentiate,
    Drop,
    Fetch,
    GiveBackParameters,
    Group,
    HandOver,
    Layers,
    Leave,
    Linearize,
    ReduceGradients,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    StepProgram,
    SumShares,
    TakeParameters,
    Zeros,
)
from .text import step_line
from .values import Value, ValueKind


class UnsoundStep(Exception):
    """A step reads what is not there, or leaves undone what it promises.

    Attributes:
        instruction: the one at which that is seen; None: the end.
    """

    def __init__(self, instruction: StepInstruction | None, words: str) -> None:
        place = "at the end" if instruction is None else f"at `{step_line(instruction)}`"
        super().__init__(f"step program, {place}: {words}")
        self.instruction = instruction


class _Fault(Exception):
    """What is wrong, before it is known where."""


def check_step(program: StepProgram, dropped: bool = True) -> None:
    """Prove that a step program is sound.

    What is read is held, on the device, and was not written over; nothing is made twice; a gradient is read
    when all its parts are added, and only then; what is promised is returned and handed over, once; nothing
    else is left at the end.

    Args:
        dropped: values are dropped when nobody reads them any more; without that something may be left.

    Raises:
        UnsoundStep: it is not.
    """
    state = _State(program, dropped)
    for part in (program.prologue, program.forward, program.backward):
        if part is program.backward:
            state.gathered |= program.forward_only  # nobody asks for them
        for instruction in part:
            _follow(state, instruction)
    try:
        state.end()
    except _Fault as fault:
        raise UnsoundStep(None, str(fault)) from None


def _follow(state: _State, instruction: StepInstruction) -> None:
    try:
        CHECKS[type(instruction)](state, instruction)
    except _Fault as fault:
        raise UnsoundStep(instruction, str(fault)) from None


class _State:
    """What is known between two instructions.

    Attributes:
        held: values that are held, on the device or elsewhere.
        away: those that have left the device.
        spoiled: those whose memory something else has taken.
        to_add: parts that are still to be added, of each gradient.
        returned, handed_over: what was.
        group_of: by parameter, with whom it is gathered.
        gathered: groups that are there.
        shares: gradients are those of this device's rows.
        whole: gradients of which the shares of all devices were summed.
        stayed: those that were given back in the forward, and are still there.
        summed: parameters whose gradients have been summed over the devices.
    """

    def __init__(self, program: StepProgram, dropped: bool) -> None:
        self.program, self.dropped = program, dropped
        self.held = set(program.given)
        self.away: set[Value] = set()
        self.spoiled: set[Value] = set()
        adds = (i for i in program.instructions() if isinstance(i, Add))
        self.to_add = Counter(v for i in adds for v in i.results)
        self.returned: set[Value] = set()
        self.handed_over: set[Value] = set()
        self.group_of = {v: k for k, group in enumerate(program.groups) for v in group}
        self.gathered: set[int] = set()
        self.whole: set[Value] = set()
        self.saves: dict[Value, tuple[Piece, ...]] = {}
        self.shares = any(call.way.several for call in program.calls())
        self.stayed: set[int] = set()
        self.summed: set[Value] = set()

    def read(self, value: Value) -> None:
        if value in self.group_of and self.group_of[value] not in self.gathered:
            raise _Fault(f"{value.name} is not gathered")
        if value not in self.held:
            raise _Fault(f"{value.name} is not held")
        if value in self.away:
            raise _Fault(f"{value.name} has left the device")
        if value in self.spoiled:
            raise _Fault(f"{value.name} was written over")

    def complete(self, value: Value) -> None:
        """A gradient is read when nothing will be added to it."""
        if value.kind is ValueKind.GRADIENT and self.to_add[value]:
            raise _Fault(f"not all parts of {value.name} are added yet")

    def make(self, value: Value) -> None:
        if value in self.held:
            raise _Fault(f"{value.name} is made twice")
        self.held.add(value)

    def let_go(self, value: Value) -> None:
        if value not in self.held:
            raise _Fault(f"{value.name} is not held")
        self.held.remove(value)
        self.away.discard(value)
        self.spoiled.discard(value)

    def end(self) -> None:
        missing = [v.name for v in self.program.returned if v not in self.returned]
        if missing:
            raise _Fault(f"{missing[0]} is not returned")
        missing = [v.name for v in self.program.gradients if v not in self.handed_over]
        if missing and self.program.backward:
            raise _Fault(f"{missing[0]} is not handed over")
        if self.gathered - self.program.forward_only:
            raise _Fault(f"group {min(self.gathered)} of parameters is not given back")
        missing = [v.name for v in self.program.summed if v not in self.summed]
        if missing and self.program.backward:
            raise _Fault(f"the gradient of {missing[0]} is not summed over the devices")
        left = self.held - {*self.program.given, *self.program.returned}
        if left and self.dropped:
            raise _Fault(f"{min(v.name for v in left)} is left")


def _run(state: _State, instruction: StepInstruction) -> None:
    """Reads inputs, makes results."""
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
    for value in instruction.consumed:
        state.let_go(value)
    for value in instruction.results:
        state.make(value)


def _run_part(state: _State, instruction: RunPart) -> None:
    part = instruction.part
    if [v.node for v in instruction.results] != [n for n in part.outputs if n not in part.inputs]:
        raise _Fault("its results are not those of the part")
    _run(state, instruction)


def _differentiate(state: _State, instruction: Differentiate) -> None:
    given = {v.node for v in instruction.inputs if v.kind is ValueKind.GRADIENT}
    if not given or not given <= set(instruction.part.outputs):
        raise _Fault("no gradient of its outputs is read")
    wanted = {v.node for v in instruction.results}
    if not wanted <= set(instruction.part.inputs):
        raise _Fault("a result is no gradient of what it reads")
    _run(state, instruction)


def _call(state: _State, instruction: Call) -> None:
    _is_called_rightly(state, instruction)
    _run(state, instruction)
    taken = instruction.way.overwrites
    pairs = zip(instruction.procedure.parameters, instruction.inputs, strict=False)
    state.spoiled |= {v for b, v in pairs if b in taken and v in state.held}


def _is_called_rightly(state: _State, instruction: Call) -> None:
    """Its values are those that the procedure takes and makes."""
    procedure = instruction.procedure
    more = len(instruction.inputs) - len(procedure.parameters)
    scaling = instruction.procedure_name == "scaling"
    if more < 0 or (more and not scaling and not isinstance(instruction, CallLoss)):
        raise _Fault(f"the procedure takes {len(procedure.parameters)} values, not {len(instruction.inputs)}")
    for buffer, value in zip(procedure.parameters, instruction.inputs, strict=False):
        _fits(buffer, value, scaling)
    if not isinstance(instruction, CallLoss):
        if len(procedure.results) != len(instruction.results):
            raise _Fault(
                f"the procedure has {len(procedure.results)} results, not {len(instruction.results)}"
            )
        for buffer, value in zip(procedure.results, instruction.results, strict=True):
            _fits(buffer, value, False)
    _saved(state, instruction)


def _chunks_first(state: _State, instruction: ChunksFirst) -> None:
    """Each segment takes what the one before it hands on, and reads nothing else that does not come in."""
    kinds = (BufferKind.OUTPUT, BufferKind.ROWS), (BufferKind.GRADIENT, BufferKind.COTANGENT)
    ways = [(instruction.again, *kinds[0]), (instruction.body, *kinds[bool(instruction.again)])]
    for calls, gives, takes in ways:
        handed: Buffer | None = None
        for call in calls:
            _is_called_rightly(state, call)
            taken = [b for b in call.procedure.passing if b.kind is takes]
            if [shape_of(b.node) for b in taken] != [shape_of(b.node) for b in (handed,) if b is not None]:
                raise _Fault(f"segment {call.segment} does not take what is handed to it")
            handed = next((b for b in call.procedure.passing if b.kind is gives), None)
            if not set(instruction.inputs).issuperset(call.inputs):
                raise _Fault(f"segment {call.segment} reads what does not come in")
    ran = [call.segment for call in instruction.again]
    back = [call.segment for call in instruction.body][::-1]
    if ran and ran[len(ran) - len(back) :] != back:
        raise _Fault("segments do not run backwards in the reverse order")
    if [v for call in instruction.body for v in call.results] != [*instruction.results]:
        raise _Fault("it does not make its results")
    _run(state, instruction)
    for call in instruction.body:
        pairs = zip(call.procedure.parameters, call.inputs, strict=True)
        state.spoiled |= {v for b, v in pairs if b in call.way.overwrites and v in state.held}


def _saved(state: _State, instruction: Call) -> None:
    """What is read of a forward is what that has saved."""
    saves = instruction.way.saves
    for value in (*instruction.inputs, *instruction.results):
        if value.kind is ValueKind.KEPT and state.saves.setdefault(value, saves) != saves:
            raise _Fault(f"{value.name} is not what the forward has saved")


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
        raise _Fault(f"{value.name} stands where the procedure has {buffer.name}")


def _group(state: _State, instruction: Group) -> None:
    before = set(state.held)
    for inner in instruction.body:
        _follow(state, inner)
    made = state.held - before
    left = made - set(instruction.results)
    if left and not state.dropped:
        state.held -= left
    elif left:
        raise _Fault(f"{min(v.name for v in left)} is left of what it makes")
    if not made.issuperset(instruction.results):
        raise _Fault("it does not make its results")
    if not set(instruction.inputs) <= before:
        raise _Fault("it does not hold its inputs")


def _again(state: _State, instruction: Again) -> None:
    if not state.dropped:
        state.held -= set(instruction.results)
    for inner in instruction.body:
        _follow(state, inner)


def _layers(state: _State, instruction: Layers) -> None:
    for body in instruction.rounds:
        for inner in body:
            _follow(state, inner)


def _leave(state: _State, instruction: Leave) -> None:
    for value in instruction.inputs:
        state.read(value)
        if value in state.program.given or value in state.program.returned:
            raise _Fault(f"{value.name} belongs to the caller")
        state.away.add(value)


def _fetch(state: _State, instruction: Fetch) -> None:
    for value in instruction.inputs:
        if value not in state.held or value not in state.away:
            raise _Fault(f"{value.name} has not left")
        state.away.remove(value)


def _drop(state: _State, instruction: Drop) -> None:
    for value in instruction.inputs:
        if value in state.program.given or value in state.program.returned:
            raise _Fault(f"{value.name} belongs to the caller")
        if value.kind is ValueKind.UNSCALED:
            raise _Fault(f"{value.name} is dropped before it is scaled")
        state.complete(value)
        state.let_go(value)


def _return(state: _State, instruction: Return) -> None:
    for value in instruction.inputs:
        state.read(value)
        if value in state.returned:
            raise _Fault(f"{value.name} is returned twice")
        state.returned.add(value)


def _seed(state: _State, instruction: Seed) -> None:
    for value in instruction.results:
        if not any(v.node is value.node for v in state.returned):
            raise _Fault(f"{value.name}: the caller was not given what it is the gradient of")
        state.make(value)


def _add(state: _State, instruction: Add) -> None:
    part, (total,) = instruction.inputs[-1], instruction.results
    state.read(part)
    if part.node is not total.node:
        raise _Fault(f"{part.name} is no part of {total.name}")
    if len(instruction.inputs) > 1:
        state.read(instruction.inputs[0])
        if instruction.inputs[0] != total:
            raise _Fault(f"the sum is {total.name}, and {instruction.inputs[0].name} is added to")
    else:
        state.make(total)
    state.let_go(part)
    state.to_add[total] -= 1


def _sum_shares(state: _State, instruction: SumShares) -> None:
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
        if value in state.whole:
            raise _Fault(f"{value.name} is summed twice")
        state.whole.add(value)


def _hand_over(state: _State, instruction: HandOver) -> None:
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
        if value not in state.program.gradients:
            raise _Fault(f"{value.name} is not what the caller is promised")
        if value in state.handed_over:
            raise _Fault(f"{value.name} is handed over twice")
        group = state.group_of.get(Value(ValueKind.CAPTURED, value.node))
        if group is not None and group not in state.gathered:
            raise _Fault(f"{value.name} comes after its parameter was given back")
        if state.shares and value not in state.whole:
            raise _Fault(f"{value.name} is this device's share, and is not summed")
        state.handed_over.add(value)
        state.let_go(value)


def _take_parameters(state: _State, instruction: TakeParameters) -> None:
    if instruction.group in state.gathered:
        raise _Fault("it is gathered already")
    if instruction.inputs != state.program.groups[instruction.group]:
        raise _Fault("these are not the parameters of the group")
    if instruction.there != (instruction.group in state.stayed):
        raise _Fault("they have not stayed" if instruction.there else "they have stayed, and need no gather")
    state.gathered.add(instruction.group)


def _give_back_parameters(state: _State, instruction: GiveBackParameters) -> None:
    if instruction.group not in state.gathered:
        raise _Fault("it is not gathered")
    state.gathered.remove(instruction.group)
    if instruction.stays:
        state.stayed.add(instruction.group)


def _reduce_gradients(state: _State, instruction: ReduceGradients) -> None:
    for value in instruction.inputs:
        if Value(ValueKind.GRADIENT, value.node) not in state.handed_over:
            raise _Fault(f"the gradient of {value.name} is not handed over yet")
        if value in state.summed:
            raise _Fault(f"the gradient of {value.name} is summed twice")
        state.summed.add(value)


CHECKS: Mapping[type, Callable[[_State, Any], None]] = {
    RunPart: _run_part,
    Differentiate: _differentiate,
    Linearize: _run,
    Call: _call,
    CallLoss: _call,
    ChunksFirst: _chunks_first,
    Group: _group,
    Again: _again,
    Layers: _layers,
    Leave: _leave,
    Fetch: _fetch,
    Drop: _drop,
    Defer: _run,
    Return: _return,
    Seed: _seed,
    Zeros: _run,
    Add: _add,
    HandOver: _hand_over,
    CollectRows: _run,
    SumShares: _sum_shares,
    TakeParameters: _take_parameters,
    GiveBackParameters: _give_back_parameters,
    ReduceGradients: _reduce_gradients,
}
