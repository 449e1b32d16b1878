"""step_state: what the checker knows of a step between two instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch.fx import Node

from ...graph.facts import Kind, Segment
from ...graph.subgraph import Subgraph
from ...s3_cut.alive_bytes import row_axis
from ...step.faults import Fault
from ...step.way import Way
from ..program import (
    Add,
    Again,
    Call,
    ChunksFirst,
    CollectRows,
    Group,
    StepInstruction,
    StepProgram,
    Zeros,
)
from ..program.values import DEVICE, Value, ValueKind


class Gradients:
    """Who makes which gradient in a step, and what of it has come.

    Attributes:
        made: values of the graph of which some instruction makes a gradient, or a part of one.
        none: those for which there are zeros.
        to_add: parts that are still to be added, of each gradient.
        differentiated: segments that were differentiated; `EPILOGUE` may be among them.
        handed_over: what was.
        whole: gradients of which the shares of all devices were summed.
    """

    def __init__(self, program: StepProgram) -> None:
        self.made: set[Node | None] = set()
        self.none: set[Node | None] = set()
        self.to_add: Counter[Value] = Counter()
        for instruction in program.instructions():
            found = [v for v in instruction.results if v.kind is ValueKind.GRADIENT]
            if isinstance(instruction, Zeros):
                self.none.update(v.node for v in found)
            elif not isinstance(instruction, Add):
                self.made.update(v.node for v in found)
                self.to_add.update(Value(v.kind, v.node) for v in found if v.segment is not None)
        self.differentiated: set[int] = set()
        self.handed_over: set[Value] = set()
        self.whole: set[Value] = set()

    def comes(self, node: Node) -> bool:
        """True if some instruction of the step makes a gradient of a value, be it zeros."""
        return node in self.made or node in self.none

    def differentiate(self, segment: int) -> None:
        """A segment, or the epilogue, is differentiated.

        Raises:
            Fault: it was before.
        """
        if segment in self.differentiated:
            raise Fault("it is differentiated twice")
        self.differentiated.add(segment)


class Grouped:
    """What is run again, and what lies elsewhere meanwhile.

    Attributes:
        groups: by their last segment.
        last_of: the last segment of the group, by segment.
        ran_again: groups that were run again, by their last segments.
        keepers: what each instruction of the forward keeps that does not keep it on the device.
        place: where all that keep something keep it; None: none has come yet.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.last_of: dict[int, int] = {}
        self.ran_again: set[int] = set()
        self.keepers: list[tuple[Value, ...]] = []
        self.place: str | None = None

    def needed_again(self, segment: int) -> bool:
        """True if the group of a segment, if it is in one, must be run again, and was not."""
        last = self.last_of.get(segment)
        return last is not None and last not in self.ran_again and bool(self.groups[last].again)


class Shared:
    """What several devices share.

    Attributes:
        group_of: by parameter, with whom it is gathered.
        gathered: groups that are there, with what has taken them.
        stayed: those that were given back in the forward, and are still there.
        summed: parameters whose gradients have been summed over the devices.
        shares: gradients are those of this device's rows.
        by_rows: values that segments make of which each device has its own rows.
        collected: of which all rows are gathered for the next instruction.
    """

    def __init__(self, program: StepProgram) -> None:
        self.group_of = {v: k for k, group in enumerate(program.groups) for v in group}
        self.gathered: dict[int, StepInstruction | None] = {}
        self.stayed: set[int] = set()
        self.summed: set[Value] = set()
        self.shares = any(call.way.several for call in program.calls())
        outputs = (n for s in program.facts.segments for n in s.outputs if self.shares)
        self.by_rows = frozenset(n for n in outputs if row_axis(program.facts, n) is not None)
        self.collected: CollectRows | None = None


class State:
    """What is known between two instructions.

    Attributes:
        part: "prologue", "forward" or "backward", whichever is followed.
        within: the group that is followed, or what is run again.
        follow: follows one instruction.
        held: values that are held, on the device or elsewhere.
        away: those that have left the device.
        spoiled: those whose memory something else has taken.
        unread: gradients that nobody has read yet.
        made_by: by value, what has made it last.
        returned: what was.
        ran: by segment, what runs it in the forward.
        chains: by their first segment, loops over several segments in the forward.
        all_ways: the way of the first call, of which some is common to all.
        epilogue: the part of the graph that is that.
    """

    def __init__(
        self, program: StepProgram, dropped: bool, follow: Callable[[State, StepInstruction], None]
    ) -> None:
        self.program, self.dropped, self.follow = program, dropped, follow
        self.facts = program.facts
        self.part = "prologue"
        self.within: Group | Again | None = None
        self.held = set(program.given)
        self.away: set[Value] = set()
        self.spoiled: set[Value] = set()
        self.unread: set[Value] = set()
        self.made_by: dict[Value, StepInstruction] = {}
        self.returned: set[Value] = set()
        self.ran: dict[int, StepInstruction] = {}
        self.chains: dict[int, ChunksFirst] = {}
        self.all_ways: Way | None = None
        self.epilogue: Subgraph | None = None
        self.gradients = Gradients(program)
        self.grouped = Grouped()
        self.shared = Shared(program)
        self._twins: dict[tuple[int, int], dict[Node, Node]] = {}

    # ---- the graph

    def segment(self, index: int | None) -> Segment:
        """A segment of the graph.

        Raises:
            Fault: there is none.
        """
        if not isinstance(index, int) or not 0 <= index < len(self.facts.segments):
            raise Fault(f"there is no segment {index}")
        return self.facts.segments[index]

    def values(self, nodes: Iterable[Node]) -> tuple[Value, ...]:
        """Captured values; sizes, which are numbers, are none."""
        kinds = self.facts.kinds
        return tuple(Value(ValueKind.CAPTURED, n) for n in nodes if kinds[n] is not Kind.SIZE)

    def twins(self, call: Call) -> dict[Node, Node]:
        """For each node of the segment whose programs are called, the one of the segment that calls them.

        Raises:
            Fault: the two are not alike.
        """
        key = id(call.programs), call.segment
        if key not in self._twins:
            model, own = call.programs.segment, self.segment(call.segment)
            if model.signature != own.signature:
                raise Fault(f"its programs are not those of segment {call.segment}")
            lists = ((s.nodes, s.rows, s.constants, s.whole, s.outputs) for s in (model, own))
            pairs = (zip(m, o, strict=True) for m, o in zip(*lists, strict=True))
            self._twins[key] = {m: o for pair in pairs for m, o in pair}
        return self._twins[key]

    # ---- values

    def there(self, value: Value) -> None:
        """A value is there to be read, and is what it was.

        Raises:
            Fault: it is not.
        """
        group = self.shared.group_of.get(value)
        if group is not None and group not in self.shared.gathered:
            raise Fault(f"{value.name} is not gathered")
        if value not in self.held:
            raise Fault(f"{value.name} is not held")
        if value in self.away:
            raise Fault(f"{value.name} has left the device")
        if value in self.spoiled:
            raise Fault(f"{value.name} was written over")

    def read(self, value: Value) -> None:
        """A value is read, a gradient when nothing will be added to it.

        Raises:
            Fault: it is not there, or not what it was, or not complete.
        """
        self.there(value)
        self.complete(value)
        self.unread.discard(value)

    def complete(self, value: Value) -> None:
        """A gradient is read when nothing will be added to it.

        Raises:
            Fault: parts of it are missing.
        """
        if value.kind is ValueKind.GRADIENT and self.gradients.to_add[value]:
            raise Fault(f"not all parts of {value.name} are added yet")

    def make(self, value: Value, instruction: StepInstruction) -> None:
        """A value is made.

        Raises:
            Fault: it is held already.
        """
        if value in self.held:
            raise Fault(f"{value.name} is made twice")
        self.held.add(value)
        self.made_by[value] = instruction
        if value.kind is ValueKind.GRADIENT:
            self.unread.add(value)

    def let_go(self, value: Value) -> None:
        """A value is not held any more.

        Raises:
            Fault: it was not held.
        """
        if value not in self.held:
            raise Fault(f"{value.name} is not held")
        self.held.remove(value)
        for found in (self.away, self.spoiled, self.unread):
            found.discard(value)

    # ---- the end

    def end(self) -> None:
        """The step is over.

        Raises:
            Fault: something is missing, or left.
        """
        program = self.program
        ours = {*program.given, *program.returned}
        left = [v for v in self.held - ours if self.dropped or v in self.unread]
        missing = [v for v in program.returned if v not in self.returned]
        if missing:
            raise self._at_its_maker("is not returned", missing)
        if left:
            raise self._at_its_maker("is left", sorted(left, key=lambda v: v.name))
        missing = [v for v in program.gradients if v not in self.gradients.handed_over]
        if missing:
            raise self._at_its_maker("is not handed over", missing)
        gathered = self.shared.gathered
        kept = sorted(gathered.keys() - program.forward_only)
        if kept:
            raise Fault(f"group {kept[0]} of parameters is not given back", gathered[kept[0]])
        missing = [v for v in program.summed if v not in self.shared.summed]
        if missing:
            lost = [Value(ValueKind.GRADIENT, v.node) for v in missing]
            raise self._at_its_maker("is not summed over the devices", lost)
        if self.shared.collected is not None:
            raise Fault("nobody reads these rows", self.shared.collected)

    def _at_its_maker(self, words: str, values: list[Value]) -> Fault:
        return Fault(f"{values[0].name} {words}", self.made_by.get(values[0]))


def run(state: State, instruction: StepInstruction) -> None:
    """Reads inputs, makes results."""
    for value in instruction.inputs:
        state.read(value)
    for value in instruction.consumed:
        state.let_go(value)
    for value in instruction.results:
        state.make(value, instruction)


def is_on_device(instruction: StepInstruction) -> bool:
    """True if what the backward of an instruction reads stays where it is."""
    return getattr(instruction, "place", DEVICE) == DEVICE
