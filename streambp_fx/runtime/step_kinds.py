"""Kinds of steps: what of a step's data decides which programs run it, and how."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils.checkpoint import get_device_states, set_device_states

from ..passes.graph.facts import Mask
from ..passes.s3_cut.policy import Policy
from ..passes.s4_trace.program_inputs import SPECIAL
from ..passes.s6_schedule.program import Call, CallLoss
from .segments.loss_head import Sweep
from .segments.segment_runner import SegmentRunner
from .segments.step_blocks import RowBlock, StepData


@dataclass(frozen=True)
class StepKind:
    """Two steps of one kind run the same programs in the same way.

    Attributes:
        policy: what is kept for the backward, see `policy.as_checked`.
        plain: masks that hide nothing but later rows.
        full: masks under which some row may attend to all columns.
        empty_rows: masks that may leave a row nothing to see.
        left_out: some samples are not run to the end, see NOTE [samples that have ended].
        behind: rows behind those that count hold what eager does not compute, or nothing.
        programs: of each distinct segment the traces that run (see `SegmentPrograms.traces`), whether of all
            samples or of some, and whether a chunk is not run at all.
        masked: some mask hides more than later rows.
        chunk, loss_chunk: rows of a chunk, of a layer and of the loss head.
        flags: of its data, see NOTE [where flags are 0].
    """

    policy: Policy
    plain: frozenset[Mask]
    full: frozenset[Mask]
    empty_rows: frozenset[Mask]
    left_out: bool
    behind: bool
    programs: frozenset[Hashable] = field(repr=False)
    masked: bool
    chunk: int = field(compare=False)
    loss_chunk: int = field(compare=False)
    flags: tuple[tuple[int, ...], ...] = field(compare=False, default=())

    @property
    def way(self) -> Hashable:
        """How the step runs; the programs apart."""
        return self.policy, self.plain, self.full, self.empty_rows, self.left_out, self.behind

    def covers(self, other: StepKind) -> bool:
        """True if a step of this kind runs all that one of the other kind runs."""
        return self.way == other.way and self.programs >= other.programs

    def __str__(self) -> str:
        words = ["masks in use"] if self.masked else []
        words += ["rows that see nothing"] if self.empty_rows else []
        words += ["rows left out"] if self.left_out else []
        return ", ".join(words) or "nothing masked or left out"


@dataclass
class Prepared:
    """A step of which everything is known that decides how it runs, and nothing has run.

    Attributes:
        inputs: of the graph, laid out.
        values: by node.
        sizes: of the size symbols.
    """

    inputs: tuple
    values: dict[Node, Any]
    sizes: dict[sympy.Symbol, int]
    step: StepData
    sweep: Sweep | None


class Draws:
    """The state of the random generators, to go back to."""

    def __init__(self, inputs: tuple) -> None:
        self.host, self.devices = torch.get_rng_state(), get_device_states(*inputs)

    def restore(self) -> None:
        """Go back to that state, on the host and on the devices of the inputs."""
        torch.set_rng_state(self.host)
        set_device_states(*self.devices)


def step_kind(
    calls: Iterable[Call],
    runners: Sequence[SegmentRunner | None],
    masks: Collection[Mask],
    policy: Policy,
    step: StepData,
    sweep: Sweep | None,
) -> StepKind:
    """The kind of a step that is prepared.

    Args:
        calls: those of the step's program.
        runners: of each segment.
        masks: that may hide more than later rows.
        policy: under which the step is checked.
        step, sweep: the step, and the sweep over its loss head if there is one only.
    """
    seen: dict[int, int] = {}
    programs: set[Hashable] = set()
    for call in calls:
        runner = runners[call.segment]
        if runner is None or id(runner.programs) in seen:
            continue
        number = seen[id(runner.programs)] = len(seen)
        if call.way.keeps_states:
            programs.add((number, "states of recurrences are kept"))
        extents = runner.extents(step, call.size)
        is_loss = isinstance(call, CallLoss) and sweep is not None
        blocks = sweep.blocks(extents) if is_loss and sweep is not None else runner.blocks(step, call.size)
        programs.update((number, *_trace(runner, b, step)) for b in blocks)
        if len({b.extent.start for b in blocks}) < len(extents):
            programs.add((number, "a chunk is not run"))
    left_out, behind = step.needed is not None, step.limits is not None
    masked = not step.plain.issuperset(masks)
    hide = step.plain, step.full, step.empty_rows
    how = (policy, *hide, left_out, behind, frozenset(programs), masked)
    return StepKind(*how, step.chunk, step.loss_chunk, step.flags)


def _trace(runner: SegmentRunner, block: RowBlock, step: StepData) -> tuple[Hashable, ...]:
    """Which trace runs a block, and whether it is of all samples."""
    own = {} if block.part is None else {step.batch: block.part.count}
    sizes = (own.get(s, step.sizes[s]) for s in runner.programs.symbols)
    special = tuple(v if v in SPECIAL else None for v in sizes)
    return block.extent.pattern, special, block.part is None
