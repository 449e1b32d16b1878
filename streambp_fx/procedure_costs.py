"""What the procedures of segments hold and run, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import Node

from .ledger import (
    BODIES,
    HIDDEN,
    KEPT,
    LOSS,
    PARAMETERS,
    STATE,
    STATE_GRADIENTS,
    STORED,
    Ledger,
    Moment,
    Sizes,
)
from .options import Options
from .passes.extract import Subgraph
from .passes.ir import Facts, Segment, shape_of
from .passes.kept_attention import attention_outputs, row_bytes_of_attention
from .passes.step.build import Way
from .passes.step.instructions import (
    BY_COLUMNS,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Keep,
    Overwrite,
    Procedure,
    Round,
    Run,
)
from .program_costs import ProgramCosts
from .runtime.executor import Executor
from .runtime.streamed import SegmentRunner

CAUSE_OF = {
    BufferKind.STATE: STATE,
    BufferKind.STATE_GRADIENT: STATE_GRADIENTS,
    BufferKind.SUM: PARAMETERS,
}


class ProcedureCosts(ProgramCosts):
    """Costs of what runs one segment.

    Args:
        facts: facts of the graph.
        options: how it is streamed.
        executor: the compiled graph.
        known: what was counted for another executor of the graph is counted for this one as well.
    """

    def __init__(
        self, facts: Facts, options: Options, executor: Executor, known: ProgramCosts | None = None
    ) -> None:
        super().__init__(facts, executor, known)
        self.options = options
        self.first_use: dict[Node, int] = {}
        for segment in reversed(facts.segments):
            for node in (*segment.rows, *segment.constants, *segment.whole):
                self.first_use[node] = segment.index
        self.kept_rows: dict[int, sympy.Expr] = {}

    def _walk(
        self, name: str, phase: str, ledger: Ledger, sizes: Sizes, runner: SegmentRunner
    ) -> Iterator[Moment]:
        """A procedure, instruction by instruction."""
        for instruction in self.procedure(name, runner).body:
            if isinstance(instruction, Allocate | Overwrite):
                if isinstance(instruction, Overwrite):
                    ledger.drop(self._key(instruction.old, runner))
                self._hold(instruction.buffer, ledger, sizes, runner)
            elif isinstance(instruction, Free):
                ledger.drop(self._key(instruction.buffer, runner))
            elif isinstance(instruction, Chunks):
                yield from self._calls(instruction, phase, ledger, sizes, runner)
            elif isinstance(instruction, Round):
                yield from self._round(instruction.buffer, ledger, sizes, runner)

    def procedure(self, name: str, runner: SegmentRunner) -> Procedure:
        """A part of a segment's step, as it is run for a batch without padding."""
        overwrites = runner.overwrites(self.executor.overwritten if name == "loss" else ())
        return runner.programs.procedure(name, Way(self.is_full(runner), overwrites=overwrites))

    def procedures(self, segment: Segment) -> list[Procedure]:
        """All parts of a segment's step; none of one that runs whole."""
        runner = self.executor.runners[segment.index]
        if isinstance(runner, Subgraph):
            return []
        head = self.executor.one_sweep is not None and segment is self.facts.segments[-1]
        names = ("loss", "scaling") if head else ("forward", "backward")
        return [self.procedure(n, runner) for n in (names if self.facts.trains(segment) else ("forward",))]

    def _key(self, buffer: Buffer, runner: SegmentRunner) -> tuple:
        assert buffer.node is not None
        if buffer.kind in BY_COLUMNS:
            return buffer.kind, buffer.node
        node = runner.twins[buffer.node]
        if buffer.kind is BufferKind.SUM:
            return "parameter", node, runner.segment.index
        return "value" if buffer.kind in (BufferKind.ROWS, BufferKind.OUTPUT) else "gradient", node

    def _hold(self, buffer: Buffer, ledger: Ledger, sizes: Sizes, runner: SegmentRunner) -> None:
        assert buffer.node is not None
        if buffer.kind is BufferKind.OUTPUT:
            self._hold_output(ledger, sizes, runner.twins[buffer.node])
        elif buffer.kind is BufferKind.GRADIENT:
            self._hold_gradient(ledger, sizes, runner.twins[buffer.node])
        else:
            size = self.sum_bytes(buffer.node, sizes) if buffer.wide else self.bytes_of(buffer.node, sizes)
            ledger.hold(self._key(buffer, runner), CAUSE_OF[buffer.kind], size)

    def _round(self, buffer: Buffer, ledger: Ledger, sizes: Sizes, runner: SegmentRunner) -> Iterator[Moment]:
        """A sum in a wider dtype becomes a gradient.

        Where others will be added both are held for the moment, see NOTE [rounded in place].
        """
        assert buffer.node is not None
        node, key, index = runner.twins[buffer.node], self._key(buffer, runner), runner.segment.index
        size = self.bytes_of(node, sizes)
        alone = node in self.facts.parameters and self.first_use[node] == index
        if not alone and key in ledger.held and ledger.held[key][1] != size:
            yield Moment("backward", index, None, None, ledger.bytes((PARAMETERS, size)))
            ledger.hold(key, PARAMETERS, size)

    def _calls(
        self, loop: Chunks, phase: str, ledger: Ledger, sizes: Sizes, runner: SegmentRunner
    ) -> Iterator[Moment]:
        """A loop over chunks: the calls of its program."""
        segment, cause = runner.segment, self._cause(runner.segment)
        keeps = any(isinstance(inner, Keep) for inner in loop.body)
        for run in (inner for inner in loop.body if isinstance(inner, Run)):
            calls, held = self.calls_of(runner, run, sizes), ledger.bytes()
            for call in reversed(calls) if loop.reverse else calls:
                if keeps:
                    self._hold_kept(ledger, segment, sizes, call.start)
                    held = ledger.bytes()
                now = {**held, cause: held.get(cause, 0) + call.peak}
                yield Moment(phase, segment.index, call.chunk, run.program, now, call.flops)

    def _hold_output(self, ledger: Ledger, sizes: Sizes, node: Node) -> None:
        if ("value", node) not in ledger.held:
            cause = STORED if node in self.first_use else LOSS
            ledger.hold(("value", node), cause, self.bytes_of(node, sizes))

    def _hold_gradient(self, ledger: Ledger, sizes: Sizes, node: Node) -> None:
        """Of a streamed input; autograd adds it to what others have made of that input's gradient."""
        key = ("gradient", node)
        ledger.hold(
            ("sum of gradients", node) if key in ledger.held else key, HIDDEN, self.bytes_of(node, sizes)
        )

    def _hold_kept(self, ledger: Ledger, segment: Segment, sizes: Sizes, rows: Any) -> None:
        """What is kept of attention for the first `rows` rows."""
        size = self._kept_row(segment)
        if size != 0:
            ledger.hold(("kept", segment.index), KEPT, self.value(size, sizes) * rows)

    def _kept_row(self, segment: Segment) -> sympy.Expr:
        """Bytes a row of the sequence that are kept of attention."""
        if segment.index not in self.kept_rows:
            nodes = attention_outputs(self.facts, segment) if self.options.save == "attention" else []
            each = (shape_of(n)[0] * sum(row_bytes_of_attention(n)) for n in nodes)
            self.kept_rows[segment.index] = sum(each, sympy.S.Zero)
        return self.kept_rows[segment.index]

    def _cause(self, segment: Segment) -> str:
        """What the bytes of a segment's programs are held for."""
        return LOSS if segment.index == len(self.facts.segments) - 1 and not segment.mixings else BODIES
