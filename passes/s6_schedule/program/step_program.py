"""The training step of a graph as data: which segment runs when, on what, and how long its values are held.

A step program is made by `schedule` and changed by the functions of `transforms`. Its instructions name what
they read and make. A value is held from the instruction that makes it to the one that drops it; what is given
by the caller, and what is handed to the caller, is held by the caller.

The backward is written out, in the order in which autograd runs it: each instruction of the forward that is
differentiated is a node of autograd's graph, and its counterpart in the backward is what that node does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from ...graph.facts import Facts
from ...several_devices import SeveralDevices
from .instructions import Call, Layers, StepInstruction, TakeParameters
from .one_loop import ChunksFirst
from .values import Value


@dataclass(frozen=True)
class StepProgram:
    """A training step, or a forward without gradients.

    Attributes:
        facts: of the graph whose step it is.
        given: values that the caller has: inputs, parameters, constants.
        returned: those that the caller is given.
        gradients: those that the caller is given.
        prologue: what is made of whole values, before the segments.
        forward: up to the results.
        backward: from the gradients of the results to those of the parameters; empty without gradients.
        groups: parameters that are there only between taking them and giving them back; last those that are
            taken around the call of the whole model.
        forward_only: groups that the backward does not take, nor read.
        summed: parameters whose gradients are summed over several devices.
        several: what the engine of the devices does.
    """

    facts: Facts = field(compare=False, repr=False)
    given: tuple[Value, ...]
    returned: tuple[Value, ...]
    gradients: tuple[Value, ...]
    prologue: tuple[StepInstruction, ...]
    forward: tuple[StepInstruction, ...]
    backward: tuple[StepInstruction, ...]
    groups: tuple[tuple[Value, ...], ...] = ()
    forward_only: frozenset[int] = frozenset()
    summed: tuple[Value, ...] = ()
    several: SeveralDevices = field(default_factory=SeveralDevices)
    _backward_of: dict[int, Call | ChunksFirst] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def instructions(self) -> Iterator[StepInstruction]:
        """All that are run, in order; loops and groups are taken apart."""
        for part in (self.prologue, self.forward, self.backward):
            yield from flat(part)

    def calls(self) -> list[Call]:
        """Procedures of segments that are run."""
        return [i for i in self.instructions() if isinstance(i, Call)]

    @property
    def taken_forward(self) -> list[int]:
        """Groups of parameters that the forward takes between its segments, in order."""
        takes = (i for i in flat(self.forward) if isinstance(i, TakeParameters) and not i.of_caller)
        return [i.group for i in takes]

    def backward_of(self, segment: int) -> Call | ChunksFirst | None:
        """What the backward of a segment, or of several that begin with it, runs; None if nothing does."""
        if not self._backward_of:
            calls = (i for i in unrolled(self.backward) if isinstance(i, Call))
            self._backward_of.update({i.segment: i for i in calls})
            loops = (i for i in unrolled(self.backward) if isinstance(i, ChunksFirst))
            self._backward_of.update({i.again[0].segment: i for i in loops})
        return self._backward_of.get(segment)

    def with_parts(
        self, forward: Iterable[StepInstruction], backward: Iterable[StepInstruction]
    ) -> StepProgram:
        """The same step with another forward and backward."""
        return replace(self, forward=tuple(forward), backward=tuple(backward))


def read_from_outside(body: Iterable[StepInstruction]) -> tuple[Value, ...]:
    """What instructions read that they do not make."""
    made: set[Value] = set()
    found: dict[Value, None] = {}
    for instruction in body:
        found.update((v, None) for v in instruction.inputs if v not in made)
        made.update(instruction.results)
    return tuple(found)


def segment_of(instruction: StepInstruction) -> int | None:
    """The index of the segment that an instruction runs or differentiates, if it is of one."""
    return getattr(instruction, "segment", None)


def unrolled(body: Iterable[StepInstruction]) -> Iterator[StepInstruction]:
    """Instructions one by one, with loops over layers taken apart, and groups as they are."""
    for instruction in body:
        yield from unrolled(chain(*instruction.rounds)) if isinstance(instruction, Layers) else (instruction,)


def flat(body: Iterable[StepInstruction]) -> Iterator[StepInstruction]:
    """Instructions one by one, those within loops and groups in their place."""
    for instruction in body:
        bodies = instruction.bodies
        yield from flat(chain(*bodies)) if bodies else (instruction,)


def form_of(instruction: StepInstruction) -> Hashable:
    """What an instruction does, whatever it does it to."""
    kinds = tuple(v.kind for v in (*instruction.inputs, *instruction.results))
    names = (f.name for f in fields(instruction) if not f.metadata)
    how = tuple(_form_of_field(getattr(instruction, name)) for name in names)
    return (type(instruction).__name__, len(instruction.inputs), kinds, how)


def _form_of_field(value: Any) -> Hashable:
    """Of parts and programs, which identical layers share, each is equal to itself alone."""
    if isinstance(value, StepInstruction):
        return form_of(value)
    return tuple(map(_form_of_field, value)) if isinstance(value, tuple) else value
