"""The functions that a printed step calls: sweeps over chunks, and parts that run unchunked."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ...passes.graph.facts import Segment
from ...passes.graph.subgraph import Subgraph
from ...passes.s6_schedule.program import Call, CallLoss, RunPart, StepProgram
from .context import Context, Test
from .printed_subgraphs import PrintedSubgraph
from .programs import SegmentCode
from .sweeps import Sweeps


class StepFunctions:
    """What a step program calls, printed.

    Args:
        context: what is printed.
        program: the instructions of the step.

    Attributes:
        sweeps: over the chunks of a segment, by its signature and what it keeps.
        parts: what runs unchunked, by the index of its segment.
        tail: what is made of the last segment's rows.
        whole: values that no gradient reaches.
        tests: what the step asks the data.
    """

    def __init__(self, context: Context, program: StepProgram) -> None:
        self.context, self.executor, self.segments = context, context.executor, context.facts.segments
        epilogue, note = self.executor.parts.epilogue, "What is made of the last segment's rows."
        self.tail = PrintedSubgraph(context, epilogue, "epilogue", note)
        self.tests: list[Test] = [t for t in (*context.plain.values(), *context.open.values()) if t.text]
        calls = [c for c in program.instructions() if isinstance(c, Call)]
        self.trained = {self.segments[c.segment].signature for c in calls if c.procedure_name != "forward"}
        self.keeping_states = {c.segment for c in calls if c.way.keeps_states}
        self.sweeps: dict[tuple, Sweeps] = {}
        self.parts: dict[str, PrintedSubgraph] = {}
        for instruction in program.instructions():
            if isinstance(instruction, RunPart) and instruction.segment is not None:
                self._part(instruction, instruction.segment)
            elif isinstance(instruction, Call):
                self._sweeps(instruction)
        whole = Subgraph(context.facts, self._whole_read(), set())
        self.whole = PrintedSubgraph(context, whole, "whole_values", "Values that no gradient reaches.")

    def _part(self, instruction: RunPart, index: int) -> None:
        reason = self.segments[index].reason
        note = f"Segment {index}, which runs unchunked{f': {reason}' if reason else ''}."
        printed = PrintedSubgraph(self.context, instruction.part, f"segment_{index}", note)
        self.parts[str(index)] = printed

    def _sweeps(self, instruction: Call) -> None:
        segment, runner = self.segments[instruction.segment], self.executor.runners[instruction.segment]
        key = self._key(segment)
        if key in self.sweeps:
            return
        assert runner is not None
        one_sweep, label = isinstance(instruction, CallLoss), f"segment_{segment.index}"
        trained, keeping = segment.signature in self.trained, segment.index in self.keeping_states
        code = SegmentCode(self.context, runner, label, one_sweep, trained, keeping)
        alike = [s.index for s in self.segments if self._key(s) == key]
        self.sweeps[key] = Sweeps(code, _numbers(alike))

    def _key(self, segment: Segment) -> tuple:
        return segment.signature, self.executor.policy.saves(segment), segment.index in self.keeping_states

    def sweeps_of(self, segment: Segment) -> Sweeps:
        """The sweeps that serve a segment."""
        return self.sweeps[self._key(segment)]

    def _whole_read(self) -> list[Node]:
        """Whole values that something printed reads."""
        read = {n for p in (self.tail, *self.parts.values()) for n in p.values}
        read |= {n for test in self.tests for n in test.arguments if isinstance(n, Node)}
        for segment in self.segments:
            if self._key(segment) in self.sweeps:
                read.update(self.whole_of(segment))
        return [n for n in self.executor.parts.whole.outputs if n in read]

    def whole_of(self, segment: Any) -> list[Node]:
        """What a segment's sweeps take of its whole values."""
        code = self.sweeps_of(segment).code
        of = dict(zip(code.segment.whole, segment.whole, strict=True))
        return [of[node] for node, _ in code.whole_used()]


def _numbers(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"Segment {indices[0]}"
    together = indices == list(range(indices[0], indices[-1] + 1))
    listed = f"{indices[0]}-{indices[-1]}" if together else ", ".join(map(str, indices))
    return f"Segments {listed}"
