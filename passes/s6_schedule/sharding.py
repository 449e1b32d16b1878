"""sharding: parameters of which each device stores a piece are taken before they are read, and given back.

NOTE [one gather a layer]: what gathers and reduces stands between segments and never in the program of a
chunk, so how often it runs does not depend on how many chunks there are. It depends on the graph alone, and
devices that run other lengths, other chunks or other samples gather and reduce the same in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from .program import (
    Again,
    GiveBackParameters,
    Group,
    HandOver,
    StepInstruction,
    StepProgram,
    TakeParameters,
    Value,
    ValueKind,
)
from .step_parts import StepParts


def take_parameters(program: StepProgram, parts: StepParts) -> StepProgram:
    """Each group of parameters is taken before the first instruction that reads it, and given back after the
    last one: in the forward and in the backward, there after their gradients are complete.

    What is read between the segments (by the epilogue, by outputs that are computed when they are read) is
    held from the beginning to the end.
    """
    groups = tuple(tuple(Value(ValueKind.CAPTURED, n) for n in g) for g in parts.facts.parameter_groups)
    taking = _Taking(groups)
    held = sorted(parts.held_groups)
    takes = tuple(TakeParameters(group=k, inputs=groups[k]) for k in held)
    gives = tuple(GiveBackParameters(group=k, inputs=groups[k]) for k in held)
    forward = tuple(taking.around(program.forward, held))
    backward = tuple(taking.around(program.backward, parts.forward_only_groups.union(held)))
    if backward:
        backward = (*backward[:1], *takes, *backward[1:], *gives)  # after what comes from the caller
    return replace(
        program,
        groups=groups,
        forward_only=parts.forward_only_groups,
        prologue=(*takes, *program.prologue),
        forward=(*forward[:-1], *gives, *forward[-1:]),  # before what goes to the caller
        backward=backward,
    )


class _Taking:
    """Puts takes and returns around what reads.

    Args:
        groups: their parameters.
    """

    def __init__(self, groups: Sequence[tuple[Value, ...]]) -> None:
        self.groups = groups
        self.group_of: Mapping[Node | None, int] = {v.node: k for k, g in enumerate(groups) for v in g}

    def around(self, body: Sequence[StepInstruction], there: Collection[int]) -> Iterator[StepInstruction]:
        """The instructions, with those that take what is not there."""
        read = [self._read(i) - set(there) for i in body]
        first = {g: k for k in reversed(range(len(body))) for g in read[k]}
        last = {g: k for k in range(len(body)) for g in read[k]}
        for k, instruction in enumerate(body):
            inner = isinstance(instruction, Group | Again)
            waiting = sorted(g for g in read[_waiting(body, k)] if first[g] > k) if inner else []
            first.update(dict.fromkeys(waiting, k))
            own = {g for g in read[k] if inner and first[g] == last[g]}  # its instructions take it
            begin = [*waiting, *sorted(g for g in read[k] - own if first[g] == k and g not in waiting)]
            end = sorted(g for g in read[k] - own if last[g] == k)
            yield from (TakeParameters(group=g, inputs=self.groups[g]) for g in begin)
            if isinstance(instruction, Group | Again):
                outside = set(range(len(self.groups))) - own
                instruction = replace(instruction, body=tuple(self.around(instruction.body, outside)))
            yield instruction
            yield from (GiveBackParameters(group=g, inputs=self.groups[g]) for g in end)

    def _read(self, instruction: StepInstruction) -> set[int]:
        """Groups that an instruction reads, or whose gradients it hands over."""
        kind = ValueKind.GRADIENT if isinstance(instruction, HandOver) else ValueKind.CAPTURED
        nodes = (v.node for v in instruction.inputs if v.kind is kind)
        return {self.group_of[n] for n in nodes if n in self.group_of}


def _waiting(body: Sequence[StepInstruction], place: int) -> int:
    """Where the backward is that waits for what is run again: it has begun, and has what it reads."""
    again = body[place]
    if not isinstance(again, Again):
        return place
    rest = range(place + 1, len(body))
    return next((k for k in rest if getattr(body[k], "segment", None) == again.segment), place)
