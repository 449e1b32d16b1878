"""sharding: parameters of which each device stores a piece are taken before they are read, and given back.

NOTE [one gather a layer]: what gathers and reduces stands between segments and never in the program of a
chunk, so how often it runs does not depend on how many chunks there are. It depends on the graph alone, and
devices that run other lengths, other chunks or other samples gather and reduce the same in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from ..graph.facts import tensors_of
from ..several_devices import SeveralDevices
from .program import (
    Again,
    GiveBackParameters,
    Group,
    HandOver,
    ReduceGradients,
    StepInstruction,
    StepProgram,
    TakeParameters,
)
from .program.values import Value, ValueKind
from .step_parts import StepParts


def take_parameters(program: StepProgram, parts: StepParts) -> StepProgram:
    """Each group of parameters is taken before the first instruction that reads it, and given back after the
    last one: in the forward and in the backward, there after their gradients are complete.

    What is read between the segments (by the epilogue, by outputs that are computed when they are read), and
    what is taken around the call of the model, is held from the beginning to the end.
    """
    facts, several = parts.facts, parts.facts.several or SeveralDevices()
    groups = tuple(_captured(g) for g in (*facts.parameter_groups, *several.of_caller))
    of_caller = frozenset(range(len(facts.parameter_groups), len(groups)))
    stay = frozenset(k for k, group in enumerate(several.groups) if group.stays)
    taking = _Taking(groups, of_caller, stay)
    held = sorted(parts.held_groups | of_caller)
    forward = tuple(taking.around(program.forward, held))
    there = parts.forward_only_groups.union(held)
    backward = tuple(taking.around(program.backward, there, backward=True))
    if backward:  # after what comes from the caller
        takes, gives = taking.takes(held, backward=True), taking.gives(held, backward=True)
        backward = (*backward[:1], *takes, *backward[1:], *gives)
    return replace(
        program,
        groups=groups,
        forward_only=parts.forward_only_groups,
        several=several,
        prologue=(*taking.takes(held), *program.prologue),
        forward=(*forward[:-1], *taking.gives(held), *forward[-1:]),  # before what goes to the caller
        backward=backward,
    )


def reduce_gradients(program: StepProgram, parts: StepParts) -> StepProgram:
    """Gradients are summed over the devices when those of a group, or of a bucket, are complete.

    Those of groups that are taken around the call of the model are summed at the end of the backward.
    """
    gradients = {v.node for v in program.gradients}
    own = [tuple(v for v in group if v.node in gradients) for group in program.groups]
    last = len(parts.facts.parameter_groups)
    if program.several.groups:  # of the others the gradients are in buckets
        own = [o if g.reduced_bytes else () for o, g in zip(own, program.several.groups, strict=True)]
    sums = [ReduceGradients(group=k, inputs=own[k]) for k in range(last) if own[k]]
    buckets, parameters = program.several.buckets, parts.facts.parameters
    if buckets is not None:
        handed = ([v.node for v in i.inputs] for i in program.backward if isinstance(i, HandOver))
        handed_over = [[n for n in nodes if n is not None and n in parameters] for nodes in handed]
        order = itertools.chain(*handed_over) if buckets.arrival is None else buckets.arrival(handed_over)
        filled = enumerate(buckets.fill({n: bytes_of(n) for n in order}))
        sums += [ReduceGradients(bucket=k, inputs=_captured(bucket)) for k, bucket in filled]
    missing = [{v.node for v in one.inputs} for one in sums]
    backward: list[StepInstruction] = []
    for instruction in program.backward:
        backward.append(instruction)
        if isinstance(instruction, HandOver):
            come = {v.node for v in instruction.inputs}
            ends = [k for k, nodes in enumerate(missing) if nodes and nodes <= come]
            for nodes in missing:
                nodes -= come
            backward += [sums[k] for k in ends]
    if backward:
        late = [ReduceGradients(group=k, inputs=own[k]) for k in range(last, len(own)) if own[k]]
        place = next((k for k, i in enumerate(backward) if _ends_the_call(i)), len(backward))
        backward[place:place] = late
        sums += late
    return replace(program, backward=tuple(backward), summed=tuple(v for one in sums for v in one.inputs))


def bytes_of(node: Node) -> int:
    """Bytes of a parameter."""
    (value,) = tensors_of(node)
    return int(value.numel()) * value.element_size()


def _ends_the_call(instruction: StepInstruction) -> bool:
    return isinstance(instruction, GiveBackParameters) and instruction.of_caller


def _captured(nodes: Iterable[Node]) -> tuple[Value, ...]:
    return tuple(Value(ValueKind.CAPTURED, n) for n in nodes)


class _Taking:
    """Puts takes and returns around what reads.

    Args:
        groups: their parameters.
        of_caller: groups that are taken around the call of the model.
        stay: groups that are there until the backward has run.
    """

    def __init__(
        self, groups: Sequence[tuple[Value, ...]], of_caller: frozenset[int], stay: frozenset[int]
    ) -> None:
        self.groups, self.of_caller, self.stay = groups, of_caller, stay
        self.group_of: Mapping[Node | None, int] = {v.node: k for k, g in enumerate(groups) for v in g}

    def takes(self, numbers: Iterable[int], backward: bool = False) -> tuple[TakeParameters, ...]:
        """What takes groups."""
        return tuple(
            TakeParameters(
                group=k,
                inputs=self.groups[k],
                there=backward and k in self.stay,
                of_caller=k in self.of_caller,
            )
            for k in numbers
        )

    def gives(self, numbers: Iterable[int], backward: bool = False) -> tuple[GiveBackParameters, ...]:
        """What gives groups back."""
        return tuple(
            GiveBackParameters(
                group=k,
                inputs=self.groups[k],
                stays=not backward and k in self.stay,
                of_caller=k in self.of_caller,
            )
            for k in numbers
        )

    def around(
        self, body: Sequence[StepInstruction], there: Collection[int], backward: bool = False
    ) -> Iterator[StepInstruction]:
        """The instructions, with those that take what is not there."""
        read = [self._read(i) - set(there) for i in body]
        first = {g: k for k in reversed(range(len(body))) for g in read[k]}
        last = {g: k for k in range(len(body)) for g in read[k]}
        for k, instruction in enumerate(body):
            inner = isinstance(instruction, Group | Again)
            behind = _waiting(body, k)
            waiting = [] if behind is None else sorted(g for g in read[behind] if first[g] >= k)
            first.update(dict.fromkeys(waiting, k))
            own = {g for g in read[k] if inner and first[g] == last[g]}  # its instructions take it
            begin = [*waiting, *sorted(g for g in read[k] - own if first[g] == k and g not in waiting)]
            end = sorted(g for g in read[k] - own if last[g] == k)
            yield from self.takes(begin, backward)
            if isinstance(instruction, Group | Again):
                outside = set(range(len(self.groups))) - own
                instruction = replace(
                    instruction, body=tuple(self.around(instruction.body, outside, backward))
                )
            yield instruction
            yield from self.gives(end, backward)

    def _read(self, instruction: StepInstruction) -> set[int]:
        """Groups that an instruction reads, or whose gradients it hands over."""
        kind = ValueKind.GRADIENT if isinstance(instruction, HandOver) else ValueKind.CAPTURED
        nodes = (v.node for v in instruction.inputs if v.kind is kind)
        return {self.group_of[n] for n in nodes if n in self.group_of}


def _waiting(body: Sequence[StepInstruction], place: int) -> int | None:
    """Where the backward is that waits for what is run again: it has begun, and has what it reads.

    None for anything else, and where nothing waits.
    """
    again = body[place]
    if not isinstance(again, Again):
        return None
    rest = range(place + 1, len(body))
    return next((k for k in rest if getattr(body[k], "segment", None) == again.segment), None)
