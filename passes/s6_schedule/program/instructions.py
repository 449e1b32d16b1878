"""The instructions of a training step: each names what it reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import sympy

from ...graph.subgraph import Subgraph
from ...step.instructions import Buffer, BufferKind
from ...step.procedure import Procedure
from ...step.row_chunks import ChunkSize, chunk_size
from ...step.way import Way
from .values import DEVICE, ROWS_OF_CHUNK, Value, ValueKind

if TYPE_CHECKING:
    from ...s5_lower.programs import SegmentPrograms


Self = TypeVar("Self", bound="StepInstruction")
EVERYWHERE = frozenset({"prologue", "forward", "backward", "within"})
FORWARD, BACKWARD = frozenset({"forward"}), frozenset({"backward"})
#: Of a field that tells the instructions of one layer from those of the next, and nothing that they do.
WHOSE = {"whose": True}


@dataclass(frozen=True, kw_only=True)
class StepInstruction:
    """What all instructions of a step have.

    Attributes:
        inputs: what is read; sizes, which are numbers, are not among it.
        results: what is made.
        holds: the fields that hold instructions.
        places: where it may stand; "within" is within a group, or within what is run again.
    """

    inputs: tuple[Value, ...] = field(default=(), metadata=WHOSE)
    results: tuple[Value, ...] = field(default=(), metadata=WHOSE)
    holds: ClassVar[tuple[str, ...]] = ()
    places: ClassVar[frozenset[str]] = frozenset()

    @property
    def bodies(self) -> tuple[tuple[StepInstruction, ...], ...]:
        """Instructions that it runs, in order."""
        return tuple(getattr(self, name) for name in self.holds)

    def with_bodies(
        self: Self, change: Callable[[tuple[StepInstruction, ...]], Iterable[StepInstruction]]
    ) -> Self:
        """The same, with all instructions that it holds changed."""
        changed: dict[str, Any] = {name: tuple(change(getattr(self, name))) for name in self.holds}
        return replace(self, **changed)

    @property
    def consumed(self) -> tuple[Value, ...]:
        """Inputs that are nothing of their own afterwards."""
        return ()


@dataclass(frozen=True, kw_only=True)
class RunPart(StepInstruction):
    """A part of the graph in ordinary PyTorch, all rows at once.

    Attributes:
        part: the subgraph; its outputs are the results.
        name: "whole values" (no gradient), "segment", "epilogue" or "predicates" (what branches on data ask).
        segment: index of the segment that runs unchunked.
        place: where what its backward reads lies meanwhile.
        recorded: within a group: where it is run again autograd records it, and its backward runs nothing.
    """

    places = frozenset({"prologue", "forward", "within"})
    part: Subgraph
    name: str
    segment: int | None = field(default=None, metadata=WHOSE)
    place: str = DEVICE
    recorded: bool = False


@dataclass(frozen=True, kw_only=True)
class Differentiate(StepInstruction):
    """A part that ran in ordinary PyTorch is run again with a graph and differentiated.

    Inputs are gradients of its outputs, then what it reads; results are gradients of what it reads.
    """

    places = BACKWARD
    part: Subgraph
    name: str
    segment: int | None = field(default=None, metadata=WHOSE)


@dataclass(frozen=True, kw_only=True)
class Linearize(StepInstruction):
    """The derivative of the loss in the rows of its head: the same wherever it is taken, so at zero."""

    places = frozenset({"prologue"})
    part: Subgraph


@dataclass(frozen=True, kw_only=True)
class Call(StepInstruction):
    """A procedure of a segment.

    Attributes:
        programs: of the segment; identical segments share them.
        segment: its index.
        procedure_name, way: which procedure; inputs and results are those of the procedure, in order.
        place: where what its backward reads lies meanwhile.
    """

    places = frozenset({"forward", "backward", "within"})
    programs: SegmentPrograms
    segment: int = field(metadata=WHOSE)
    procedure_name: str
    way: Way
    place: str = DEVICE

    @property
    def procedure(self) -> Procedure:
        """The instructions that are run."""
        return self.programs.procedure(self.procedure_name, self.way)

    @property
    def chunks(self) -> sympy.Expr:
        """How many chunks there are, in the sequence length and the rows of a chunk."""
        segment, sequence = self.programs.segment, self.programs.facts.sequence
        assert sequence is not None
        return sympy.ceiling((sequence - segment.removed) / ROWS_OF_CHUNK[self.size])

    @property
    def size(self) -> ChunkSize:
        """How many rows a chunk has at most."""
        return chunk_size(self.programs.segment, self.way.together is not None)

    def bindings(self) -> dict[Buffer, Value]:
        """The values that the buffers of the procedure stand for, as far as they outlive it."""
        found = dict(zip(self.procedure.parameters, self.inputs, strict=False))
        return {**found, **dict(zip(self.procedure.results, self.results, strict=False))}

    @property
    def consumed(self) -> tuple[Value, ...]:
        """Unscaled gradients are scaled in place."""
        return tuple(v for v in self.inputs if v.kind is ValueKind.UNSCALED)


@dataclass(frozen=True, kw_only=True)
class CallLoss(Call):
    """A loss head and the epilogue together: values, and gradients for a unit gradient of the loss.

    Inputs are those of the procedure "loss", then what else the epilogue reads; results are those of the
    epilogue, then the unscaled gradients. The rows of the head are made and read within.

    Attributes:
        part: the epilogue.
        position: of the loss among its outputs.
    """

    places = FORWARD
    part: Subgraph
    position: int

    def bindings(self) -> dict[Buffer, Value]:
        """As of any call; the rows of the head are read by the epilogue and do not outlive it."""
        found = dict(zip(self.procedure.parameters, self.inputs, strict=False))
        made = [b for b in self.procedure.results if b.kind is not BufferKind.OUTPUT]
        unscaled = [v for v in self.results if v.kind is ValueKind.UNSCALED]
        return {**found, **dict(zip(made, unscaled, strict=True))}

    @property
    def consumed(self) -> tuple[Value, ...]:
        """Nothing: what is written over is a value that nobody else reads, and is dropped."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Group(StepInstruction):
    """Of these instructions only the inputs of the first are kept: `again` runs before their backward.

    Attributes:
        body: calls and parts, one a segment.
        again: those whose results the backward of the group reads.
        place: where the inputs lie meanwhile.
    """

    places = FORWARD
    body: tuple[StepInstruction, ...]
    again: tuple[StepInstruction, ...]
    place: str = DEVICE
    holds = ("body", "again")

    @property
    def bodies(self) -> tuple[tuple[StepInstruction, ...], ...]:
        """`again` is run by an instruction of its own."""
        return (self.body,)


@dataclass(frozen=True, kw_only=True)
class Again(StepInstruction):
    """In the backward: what a group has not kept is made again.

    Attributes:
        segment: the last of the group, whose backward waits for it.
    """

    places = BACKWARD
    body: tuple[StepInstruction, ...]
    segment: int = field(metadata=WHOSE)
    holds = ("body",)


@dataclass(frozen=True, kw_only=True)
class Leave(StepInstruction):
    """Waits until the inputs have left the device, and lets them go there."""

    places = FORWARD
    number: int = field(metadata=WHOSE)


@dataclass(frozen=True, kw_only=True)
class Fetch(StepInstruction):
    """Begins to bring the inputs back to the device; whoever reads them waits for them."""

    places = BACKWARD


@dataclass(frozen=True, kw_only=True)
class Drop(StepInstruction):
    """The inputs are let go: nobody reads them any more."""

    places = EVERYWHERE


@dataclass(frozen=True, kw_only=True)
class Defer(StepInstruction):
    """The result, an output, is computed from the inputs when somebody reads it.

    It holds them as long as the caller holds it; nothing else of the step does.

    Attributes:
        part: how.
        position: among the results of the graph.
    """

    places = FORWARD
    part: Subgraph
    position: int


@dataclass(frozen=True, kw_only=True)
class Return(StepInstruction):
    """The inputs go to the caller."""

    places = FORWARD


@dataclass(frozen=True, kw_only=True)
class Seed(StepInstruction):
    """The results, gradients of what was returned, come from the caller."""

    places = BACKWARD


@dataclass(frozen=True, kw_only=True)
class Zeros(StepInstruction):
    """The gradient of an output to which none comes."""

    places = BACKWARD


@dataclass(frozen=True, kw_only=True)
class Add(StepInstruction):
    """The last input, a part of a gradient, is added to what there is of it: to the first input, if any."""

    places = BACKWARD

    @property
    def consumed(self) -> tuple[Value, ...]:
        """The part."""
        return self.inputs[-1:]


@dataclass(frozen=True, kw_only=True)
class HandOver(StepInstruction):
    """Finished gradients of what the caller has given, parameters above all, go to the caller."""

    places = BACKWARD

    @property
    def consumed(self) -> tuple[Value, ...]:
        """They are the caller's."""
        return self.inputs


@dataclass(frozen=True, kw_only=True)
class TakeParameters(StepInstruction):
    """Parameters of which each device stores a piece are gathered: the inputs.

    Attributes:
        group: those that are gathered together, by number, see `StepProgram.groups`.
        there: they have stayed since the forward, and nothing is gathered.
        of_caller: it is done around the call of the whole model, by hooks of the engine.
    """

    places = EVERYWHERE
    group: int = field(metadata=WHOSE)
    there: bool = False
    of_caller: bool = False


@dataclass(frozen=True, kw_only=True)
class GiveBackParameters(StepInstruction):
    """Each device has its piece of the inputs again, and nothing more.

    Attributes:
        group: as in `TakeParameters`.
        stays: in the forward: the engine keeps them until the backward has run.
        of_caller: as in `TakeParameters`.
    """

    places = EVERYWHERE
    group: int = field(metadata=WHOSE)
    stays: bool = False
    of_caller: bool = False


@dataclass(frozen=True, kw_only=True)
class ReduceGradients(StepInstruction):
    """The gradients of the inputs, which have been handed over, are summed over the devices, by the engine.

    Attributes:
        group: the parameters are of this group, and each device has a piece of the sum; None: they are those
            of a bucket, see `Buckets`.
        bucket: its number.
    """

    places = BACKWARD
    group: int | None = field(default=None, metadata=WHOSE)
    bucket: int | None = field(default=None, metadata=WHOSE)


@dataclass(frozen=True, kw_only=True)
class CollectRows(StepInstruction):
    """All rows of the inputs, of which each device has its own, are gathered for the next instruction.

    Attributes:
        partial: the gradient that comes back is a device's share, and is summed over the devices.
    """

    places = frozenset({"forward", "within"})
    partial: bool


@dataclass(frozen=True, kw_only=True)
class SumShares(StepInstruction):
    """The inputs, gradients that are complete on each device, are summed over the devices."""

    places = BACKWARD


@dataclass(frozen=True, kw_only=True)
class Layers(StepInstruction):
    """A loop over identical layers.

    Attributes:
        rounds: the body as each layer runs it: the same instructions on its own values.
    """

    places = FORWARD | BACKWARD
    rounds: tuple[tuple[StepInstruction, ...], ...]

    @property
    def bodies(self) -> tuple[tuple[StepInstruction, ...], ...]:
        """One for each layer."""
        return self.rounds
