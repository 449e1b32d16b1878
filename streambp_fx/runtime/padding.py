"""What a step need not run, and what runs it after all. See NOTE [samples that have ended] in
`segments.step_blocks`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..passes.graph.facts import Facts, tensors_of
from ..passes.graph.subgraph import Subgraph
from ..passes.s6_schedule.program import StepProgram
from ..passes.s6_schedule.step_parts import StepParts
from .lazy_tensors import Anew
from .segments.loss_head import Sweep
from .segments.segment_runner import SegmentRunner
from .segments.step_blocks import StepData, needed
from .step_interpreter import StepFrame, run_step

LEFT_OUT = (
    "a gradient came to logits of padding, behind the last token that the loss reads; this step left those "
    'rows out. To have them run, keep the logits: torch.compile(..., options={"logits": "keep"}).'
)


class Steps(Protocol):
    """What prepares and runs the steps of a graph: its executor."""

    facts: Facts
    parts: StepParts
    runners: list[SegmentRunner | None]

    def sequences(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        """How many sequences there are."""

    def begin(self, inputs: Sequence[Any]) -> tuple[dict[Any, Any], dict[sympy.Symbol, int]]:
        """The values that a step begins with, and the sizes."""

    def program_of(self, step: StepData) -> StepProgram:
        """The instructions of a step."""

    def frame(
        self,
        values: dict[Node, Any],
        sizes: Mapping[sympy.Symbol, int],
        step: StepData,
        program: StepProgram,
    ) -> StepFrame:
        """What a step program runs in."""


class Padding:
    """Rows behind the last one that the loss reads, of a graph whose loss takes one sweep.

    Args:
        executor: of the graph.
    """

    def __init__(self, executor: Steps) -> None:
        self.executor, self.facts = executor, executor.facts
        self.parts = executor.parts
        self.runners = list(zip(executor.facts.segments, executor.runners, strict=True))

    def leave_out(self, step: StepData, sweep: Sweep, plain: frozenset[Node]) -> None:
        """Tell the step how far each sample has to be run, and which masks hide nothing where it counts.

        Args:
            plain: such masks, with those that hide nothing anywhere.
        """
        if sweep.counted is None or sweep.limits is None or self.parts.runs_to_the_end is not None:
            return
        complete, (head, runner) = dataclasses.replace(step), self.runners[-1]
        assert runner is not None
        ends = needed(sweep.counted, sweep.limits, runner.extents(step), head.removed)
        if plain > step.plain and self._may_differ(step, ends is not None):
            step.plain, step.full = step.plain | plain, step.full - plain
            step.empty_rows -= plain
        full = any(r is not None and r.is_full(step) for _, r in self.runners)
        if ends is not None and not full:
            step.needed = (max(ends),) if self.parts.samples_together else ends
        if step.needed is not None or step.plain != complete.plain:
            step.limits, step.complete = sweep.limits, complete

    def _may_differ(self, step: StepData, leaves_out: bool) -> bool:
        """True if rows that do not count may hold anything, see NOTE [masks where it counts]."""
        if self.parts.lazy and (self.parts.random or not leaves_out):
            return False
        return self.executor.sequences(step.sizes) == 1 or self.parts.dependent_samples is None

    def completion(self, part: Subgraph, inputs: Sequence[Any], step: StepData) -> Anew | None:
        """How a lazy output is read or differentiated after a step that left rows out."""
        if step.complete is None:
            return None
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        make = functools.partial(self._complete, part, tuple(inputs), step.complete)
        return Anew(tensors, make, functools.partial(self._check, part, step))

    def _complete(self, part: Subgraph, inputs: tuple, step: StepData) -> list[Any]:
        """What a part reads, as a step makes it that leaves nothing out."""
        executor = self.executor
        with torch.no_grad(), torch._C._DisableAutocast():
            values, sizes = executor.begin(inputs)
            again = dataclasses.replace(step, training=False)
            program = executor.program_of(again)
            frame = executor.frame(values, sizes, again, program)
            for instruction in program.forward:
                if all(n in values or not tensors_of(n) for n in part.inputs):
                    break
                run_step([instruction], frame)
            return [frame.value(n) for n in part.inputs]

    def _check(self, part: Subgraph, step: StepData, gradients: Sequence[Tensor | None]) -> None:
        """Raise if a gradient comes to rows that do not count."""
        assert step.limits is not None
        makers = {n: r for s, r in self.runners for n in s.outputs}
        for node, gradient in zip(part.inputs, gradients, strict=True):
            runner = makers.get(node)
            if gradient is None or runner is None:
                continue
            if any(rows.any() for rows in runner.rows_behind(step.limits, node, gradient, step)):
                raise RuntimeError(LEFT_OUT)
