"""The functions that a printed step calls: sweeps over chunks, and parts that run unchunked."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ...passes.graph.facts import Segment
from ...passes.graph.subgraph import Subgraph
from ...passes.s6_schedule.program import RunPart, StepProgram
from .context import Context, Test
from .printed_subgraphs import PrintedSubgraph
from .programs import Calls, SegmentCode
from .sweeps import Sweeps


class StepFunctions:
    """What a step program calls, printed.

    Args:
        context: what is printed.
        program: the instructions of the step.
        of_all_rows: those of a step in which some row reads all rows, wherever the data may say so.

    Attributes:
        sweeps: over the chunks of a segment, by its signature and what it keeps.
        parts: what runs unchunked, by the index of its segment.
        epilogue: what is made of the last segment's rows.
        whole: values that no gradient reaches.
        tests: what the step asks the data.
    """

    def __init__(self, context: Context, program: StepProgram, of_all_rows: StepProgram) -> None:
        self.context, self.executor, self.segments = context, context.executor, context.facts.segments
        epilogue, note = self.executor.parts.epilogue, "What is made of the last segment's rows."
        self.epilogue = PrintedSubgraph(context, epilogue, "epilogue", note)
        self.tests: list[Test] = [t for t in (*context.plain.values(), *context.open.values()) if t.text]
        self.keys: dict[int, tuple] = {}
        for call in program.calls():
            key = self.segments[call.segment].signature, call.way.saves, call.way.keeps_states
            self.keys.setdefault(call.segment, key)
        calls: dict[tuple, Calls] = {}
        for call in (*program.calls(), *of_all_rows.calls()):
            of_key = calls.setdefault(self.keys[call.segment], {})
            of_key.setdefault(call.way.full, {}).setdefault(call.procedure_name, call)
        self.sweeps = {key: self._sweeps(key, own) for key, own in calls.items()}
        self.parts: dict[str, PrintedSubgraph] = {}
        for instruction in program.instructions():
            if isinstance(instruction, RunPart) and instruction.segment is not None:
                self._part(instruction, instruction.segment)
        whole = Subgraph(context.facts, self._whole_read(), set())
        self.whole = PrintedSubgraph(context, whole, "whole_values", "Values that no gradient reaches.")

    def _part(self, instruction: RunPart, index: int) -> None:
        reason = self.segments[index].reason
        note = f"Segment {index}, which runs unchunked{f': {reason}' if reason else ''}."
        printed = PrintedSubgraph(self.context, instruction.part, f"segment_{index}", note)
        self.parts[str(index)] = printed

    def _sweeps(self, key: tuple, calls: Calls) -> Sweeps:
        alike = [index for index, own in self.keys.items() if own == key]
        runner = self.executor.runners[alike[0]]
        assert runner is not None
        return Sweeps(SegmentCode(self.context, runner, f"segment_{alike[0]}", calls), _numbers(alike))

    def sweeps_of(self, segment: Segment) -> Sweeps:
        """The sweeps that serve a segment."""
        return self.sweeps[self.keys[segment.index]]

    def _whole_read(self) -> list[Node]:
        """Whole values that something printed reads."""
        read = {n for p in (self.epilogue, *self.parts.values()) for n in p.values}
        read |= {n for test in self.tests for n in test.arguments if isinstance(n, Node)}
        for segment in self.segments:
            if segment.index in self.keys:
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
