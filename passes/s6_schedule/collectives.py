"""collectives: which collectives a step program calls, and with how many bytes.

It is read from the program, which has each gather and each sum in its place (`sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .program import (
    ReduceGradients,
    StepInstruction,
    StepProgram,
    TakeParameters,
)
from .sharding import bytes_of


class CollectiveKind(Enum):
    """What devices do together."""

    ALL_GATHER = "all-gather"  # each has a piece, and then each has all of it
    REDUCE_SCATTER = "reduce-scatter"  # each has all numbers, and then a piece of their sum
    ALL_REDUCE = "all-reduce"  # each has all numbers, and then all of their sum
    SEND = "send"  # one device after the other hands something on to its neighbour

    @property
    def sums(self) -> bool:
        """True if numbers of all devices are added."""
        return self in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


@dataclass(frozen=True)
class Collective:
    """A call of all devices.

    Attributes:
        name: of what is gathered or summed: of a module, or the number of a bucket.
        devices: how many take part.
        bytes: of the whole, which one device has afterwards (all-gather) or before (sums); of what is sent,
            those of the device that sends most.
        ahead: it may run while the step goes on.
        of_caller: it is called around the call of the whole model.
        calls: how many calls it is, one after the other; bytes are of all of them.
    """

    kind: CollectiveKind
    name: str
    devices: int
    bytes: int
    ahead: bool
    of_caller: bool = False
    calls: Any = 1

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends, and receives as many, if the devices form a ring.

        Of the whole each device has one of n parts. An all-gather and a reduce-scatter take n - 1 rounds, in
        each of which it sends one part; an all-reduce is the two of them (P. Patarasuk, X. Yuan, "Bandwidth
        optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009;
        the factors are those of NVIDIA's nccl-tests, doc/PERFORMANCE.md).
        """
        if self.kind is CollectiveKind.SEND:
            return self.bytes
        rounds = 2 if self.kind is CollectiveKind.ALL_REDUCE else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


def collectives_of(program: StepProgram, instruction: StepInstruction) -> Iterator[Collective]:
    """What an instruction of a step has the devices do together, one after the other."""
    groups, buckets = program.several.groups, program.several.buckets
    if isinstance(instruction, TakeParameters) and groups and not instruction.there:
        group = groups[instruction.group]
        kind, size = CollectiveKind.ALL_GATHER, group.gathered_bytes
        yield Collective(kind, group.name, group.devices, size, group.ahead, instruction.of_caller)
    if isinstance(instruction, ReduceGradients) and instruction.bucket is not None and buckets is not None:
        size = sum(bytes_of(v.node) for v in instruction.inputs if v.node is not None)
        name = f"bucket {instruction.bucket}"
        kind = CollectiveKind.REDUCE_SCATTER if buckets.scattered else CollectiveKind.ALL_REDUCE
        yield Collective(kind, name, buckets.devices, size, buckets.ahead)
    if isinstance(instruction, ReduceGradients) and instruction.group is not None and groups:
        group = groups[instruction.group]
        size = sum(group.reduced_bytes[v.node] for v in instruction.inputs if v.node is not None)
        caller = instruction.group >= len(groups) - len(program.several.of_caller)
        kind = CollectiveKind.REDUCE_SCATTER
        yield Collective(kind, group.name, group.devices, size, group.ahead, caller)
        if group.replicas > 1:
            kind, size = CollectiveKind.ALL_REDUCE, size // group.devices
            yield Collective(kind, group.name, group.replicas, size, group.ahead, caller)
