"""step_state: what the checker knows of a step between two instructions."""

from __future__ import annotations

from collections import Counter

from ..step.saving import Piece
from .program import Add, StepInstruction, StepProgram
from .program.values import Value, ValueKind


class Fault(Exception):
    """What is wrong, before it is known where."""


class State:
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
        """A value is read.

        Raises:
            Fault: it is not there, or not what it was.
        """
        if value in self.group_of and self.group_of[value] not in self.gathered:
            raise Fault(f"{value.name} is not gathered")
        if value not in self.held:
            raise Fault(f"{value.name} is not held")
        if value in self.away:
            raise Fault(f"{value.name} has left the device")
        if value in self.spoiled:
            raise Fault(f"{value.name} was written over")

    def complete(self, value: Value) -> None:
        """A gradient is read when nothing will be added to it.

        Raises:
            Fault: parts of it are missing.
        """
        if value.kind is ValueKind.GRADIENT and self.to_add[value]:
            raise Fault(f"not all parts of {value.name} are added yet")

    def make(self, value: Value) -> None:
        """A value is made.

        Raises:
            Fault: it is held already.
        """
        if value in self.held:
            raise Fault(f"{value.name} is made twice")
        self.held.add(value)

    def let_go(self, value: Value) -> None:
        """A value is not held any more.

        Raises:
            Fault: it was not held.
        """
        if value not in self.held:
            raise Fault(f"{value.name} is not held")
        self.held.remove(value)
        self.away.discard(value)
        self.spoiled.discard(value)

    def end(self) -> None:
        """The step is over.

        Raises:
            Fault: something is missing, or left.
        """
        missing = [v.name for v in self.program.returned if v not in self.returned]
        if missing:
            raise Fault(f"{missing[0]} is not returned")
        missing = [v.name for v in self.program.gradients if v not in self.handed_over]
        if missing and self.program.backward:
            raise Fault(f"{missing[0]} is not handed over")
        if self.gathered - self.program.forward_only:
            raise Fault(f"group {min(self.gathered)} of parameters is not given back")
        missing = [v.name for v in self.program.summed if v not in self.summed]
        if missing and self.program.backward:
            raise Fault(f"the gradient of {missing[0]} is not summed over the devices")
        left = self.held - {*self.program.given, *self.program.returned}
        if left and self.dropped:
            raise Fault(f"{min(v.name for v in left)} is left")


def run(state: State, instruction: StepInstruction) -> None:
    """Reads inputs, makes results."""
    for value in instruction.inputs:
        state.read(value)
        state.complete(value)
    for value in instruction.consumed:
        state.let_go(value)
    for value in instruction.results:
        state.make(value)
