"""collectives: which collectives a step program calls, and with how many bytes.

It is read from the program, which has each gather and each sum in its place (`sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .program import ReduceGradients, StepInstruction, StepProgram, TakeParameters, flat
from .sharding import bytes_of


class CollectiveKind(Enum):
    """What devices do together."""

    ALL_GATHER = "all-gather"  # each has a piece, and then each has all of it
    REDUCE_SCATTER = "reduce-scatter"  # each has all numbers, and then a piece of their sum
    ALL_REDUCE = "all-reduce"  # each has all numbers, and then all of their sum


@dataclass(frozen=True)
class Collective:
    """A call of all devices.

    Attributes:
        name: of what is gathered or summed: of a module, or the number of a bucket.
        devices: how many take part.
        bytes: of the whole, which one device has afterwards (all-gather) or before (the others).
        ahead: it may run while the step goes on.
        of_caller: it is called around the call of the whole model.
    """

    kind: CollectiveKind
    name: str
    devices: int
    bytes: int
    ahead: bool
    of_caller: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends, and receives as many, if the devices form a ring.

        Of the whole each device has one of n parts. An all-gather and a reduce-scatter take n - 1 rounds, in
        each of which it sends one part; an all-reduce is the two of them (P. Patarasuk, X. Yuan, "Bandwidth
        optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009;
        the factors are those of NVIDIA's nccl-tests, doc/PERFORMANCE.md).
        """
        rounds = 2 if self.kind is CollectiveKind.ALL_REDUCE else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


def collective_of(program: StepProgram, instruction: StepInstruction) -> Collective | None:
    """What an instruction of a step has the devices do together; None if nothing."""
    groups, buckets = program.several.groups, program.several.buckets
    if isinstance(instruction, TakeParameters) and groups and not instruction.there:
        group = groups[instruction.group]
        kind, size = CollectiveKind.ALL_GATHER, group.gathered_bytes
        return Collective(kind, group.name, group.devices, size, group.ahead, instruction.of_caller)
    if isinstance(instruction, ReduceGradients) and instruction.bucket is not None and buckets is not None:
        size = sum(bytes_of(v.node) for v in instruction.inputs if v.node is not None)
        name = f"bucket {instruction.bucket}"
        return Collective(CollectiveKind.ALL_REDUCE, name, buckets.devices, size, buckets.ahead)
    if isinstance(instruction, ReduceGradients) and instruction.group is not None and groups:
        group = groups[instruction.group]
        size = sum(group.reduced_bytes[v.node] for v in instruction.inputs if v.node is not None)
        caller = instruction.group >= len(groups) - len(program.several.of_caller)
        return Collective(CollectiveKind.REDUCE_SCATTER, group.name, group.devices, size, group.ahead, caller)
    return None


def collectives(program: StepProgram) -> Iterator[tuple[str, Collective]]:
    """The collectives of a step in order, each with its phase: "forward" (what comes before it, too) or
    "backward"."""
    parts = ("forward", (*program.prologue, *program.forward)), ("backward", program.backward)
    for phase, body in parts:
        for instruction in flat(body):
            found = collective_of(program, instruction)
            if found is not None:
                yield phase, found
