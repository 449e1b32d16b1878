"""own_rows: each device runs its own rows of the sequence, and what others read of them is exchanged.

Hidden states, and their gradients, lie on the device whose rows they are. Within segments the procedures
exchange states (NOTE [rows on several devices] in `passes.step.build`). Between segments, what is read whole
is gathered: by segments that run unchunked, by what the loss is made of, by the caller.

NOTE [shares of a gradient]: the gradient that a device computes is that of its own rows: of a parameter, or
of anything else that all rows read, it is a share, and the sum over the devices is the gradient. Shares are
summed once, where a gradient is handed over. What is made of the segments' outputs is computed on all
devices alike; so a gradient that comes from there is no share but the whole, and counts on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch.fx import Node

from ..graph.facts import Facts, sum_dtype, tensors_of
from ..s3_cut.alive_bytes import row_axis, row_bytes
from ..s5_lower.programs import SegmentPrograms
from .program import (
    Call,
    CallLoss,
    CollectRows,
    HandOver,
    Return,
    RunPart,
    StepInstruction,
    StepProgram,
    SumShares,
)
from .program.values import Value, ValueKind
from .step_parts import StepParts

#: States of one layer that take a larger share of what a device keeps come by blocks.
LARGE_STATES = 0.25


def segments_for_blocks(parts: StepParts, devices: int) -> frozenset[int]:
    """Segments whose states had better come from other devices block by block, if they can.

    NOTE [gathered or by blocks]: gathered, the states of all rows of one layer are on each device, and are
    sent once forwards and once backwards. By blocks a device has those of its own rows, and they are sent
    again for each of its chunks. What is held less is little beside the inputs of many layers, and much
    beside those of few, or where they are offloaded. So memory decides: that of the states of all rows with
    their gradients, against that of the rows that a device keeps between forward and backward.

    Args:
        devices: that share a sequence.
    """
    if parts.exchange != "auto":
        return frozenset(s.index for s in parts.facts.segments if parts.exchange == "blocks")
    facts, found = parts.facts, set()
    made = {n for s in facts.segments for n in s.rows}
    sizes = (row_bytes(facts, n) for n in made if n in facts.needs_grad)
    kept = 0.0 if parts.moves else sum(s for s in sizes if s < math.inf) / parts.policy.every
    for segment, programs in zip(facts.segments, parts.segments, strict=True):
        if isinstance(programs, SegmentPrograms):
            states = sum(_with_gradient(facts, n) for n in programs.states)
            if states > LARGE_STATES * kept / devices:
                found.add(segment.index)
    return frozenset(found)


def _with_gradient(facts: Facts, node: Node) -> float:
    """Bytes a row of a state and of its gradient."""
    dtype = tensors_of(node)[0].dtype
    return row_bytes(facts, node) * (1 + sum_dtype(dtype).itemsize / dtype.itemsize)


def share_rows(
    program: StepProgram, parts: StepParts, by_blocks: frozenset[int] = frozenset()
) -> StepProgram:
    """The step of one of several devices, each of which has some rows of the sequence.

    Args:
        by_blocks: segments whose chunks may read columns of other devices block by block.
    """
    made = made_by_rows(parts.facts)
    forward, backward = (_shared(b, made, by_blocks) for b in (program.forward, program.backward))
    return program.with_parts(forward, backward)


def made_by_rows(facts: Facts) -> frozenset[Node]:
    """Values that segments make of which each device has its own rows."""
    made = (n for s in facts.segments for n in s.outputs)
    return frozenset(n for n in made if row_axis(facts, n) is not None)


def _shared(
    body: Iterable[StepInstruction], made: frozenset[Node], by_blocks: frozenset[int]
) -> Iterator[StepInstruction]:
    for instruction in body:
        if instruction.bodies:
            yield instruction.with_bodies(lambda own: _shared(own, made, by_blocks))
            continue
        read = _read_whole(instruction, made)
        if read:
            yield CollectRows(inputs=read, partial=getattr(instruction, "segment", None) is not None)
        if isinstance(instruction, HandOver):
            yield SumShares(inputs=instruction.inputs)
        if isinstance(instruction, Call):
            # with the same saved of all rows all devices run the same programs at the same time
            blocks = instruction.segment in by_blocks and len(instruction.way.saves) <= 1
            instruction = replace(instruction, way=replace(instruction.way, several=True, by_blocks=blocks))
        yield instruction


def _read_whole(instruction: StepInstruction, made: frozenset[Node]) -> tuple[Value, ...]:
    """Values by rows of which an instruction of the forward reads all rows."""
    if not isinstance(instruction, RunPart | Return | CallLoss):
        return ()
    by_rows = (v for v in instruction.inputs if v.kind is ValueKind.CAPTURED and v.node in made)
    if isinstance(instruction, CallLoss):  # besides the rows of its head
        own = set(instruction.bindings().values())
        return tuple(v for v in by_rows if v not in own)
    return tuple(by_rows)
