"""Memory and work of one training step: what the runtime holds when, from the schedule and its programs.

The step is walked as the runtime runs it. Where the walk calls a program, the program's own bytes come from
liveness over its graph (`passes.cost`). With numbers for the sizes the result is a timeline; with symbols it
is an expression in the sequence length, the batch size and the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import sympy
from torch.fx import Node

from .ledger import (
    BATCH,
    BODIES,
    CHUNK,
    DATA,
    HIDDEN,
    KEPT,
    LOSS,
    LOSS_CHUNK,
    LOW,
    OUTPUTS,
    PARAMETERS,
    PREFIX,
    ROWS,
    STATE,
    STATE_GRADIENTS,
    STORED,
    TOKENS,
    TOTAL,
    Ledger,
    Moment,
    Sizes,
)
from .options import Options
from .passes.cost import ProgramCost, largest, program_cost
from .passes.extract import Subgraph
from .passes.footprints import mask_facts
from .passes.inputs import Extent
from .passes.ir import Facts, Segment, shape_of, tensors_of
from .passes.joint import joint_program
from .passes.policy import attention_outputs, row_bytes_of_attention
from .runtime.executor import Executor
from .runtime.streamed import SegmentRunner

# Two chunks of this many rows stand for "a chunk with a prefix" when programs are traced for an expression.
SAMPLE = 64


class StepCost:
    """Cost of one training step of a schedule.

    Args:
        facts: facts of the graph.
        options: how it is streamed.
        executor: the compiled graph, if there is one: its programs need not be traced again.
    """

    def __init__(self, facts: Facts, options: Options, executor: Executor | None = None) -> None:
        self.facts, self.options = facts, options
        self.executor = Executor(facts, options) if executor is None else executor
        self.plain = _unpadded(self.executor)
        self.first_use: dict[Node, int] = {}
        for segment in reversed(facts.segments):
            for node in (*segment.rows, *segment.constants, *segment.whole):
                self.first_use[node] = segment.index
        self.kept_rows: dict[int, sympy.Expr] = {}
        self.elsewhere: dict[Any, tuple[str, Any]] = {}
        on_cpu = all(v.device.type == "cpu" for n in facts.parameters for v in tensors_of(n))
        self.on_host = on_cpu and not facts.placeless
        self._programs: dict[Any, ProgramCost] = {}
        self._numbers: dict[sympy.Expr, Callable[..., Any]] = {}

    # ---- the step

    def sizes(self, tokens: int, chunk: int | None = None, others: Mapping | None = None) -> Sizes:
        """Sizes as numbers; the chunk is that of the options if it is not given."""
        rows = self.options.rows if chunk is None else chunk
        values = {s: v for s, v in self.facts.values.items() if s != self.facts.sequence}
        return Sizes(tokens, rows, self.options.loss_chunk, {**values, **(others or {})})

    @cached_property
    def symbols(self) -> Sizes:
        """Sizes as symbols: T, chunk, loss_chunk, and the symbols of other sizes."""
        return Sizes(TOKENS, CHUNK, LOSS_CHUNK)

    def timeline(self, sizes: Sizes) -> list[Moment]:
        """The step, moment by moment; bytes over weights, their gradients and the inputs."""
        ledger = Ledger()
        return [*self._forward(ledger, sizes), *self._backward(ledger, sizes)]

    def peak(self, sizes: Sizes) -> Moment:
        """The moment of a timeline at which most is held."""
        return max(self.timeline(sizes), key=lambda m: m.total)

    def peak_expression(self, batch_size: int | None = None) -> sympy.Expr:
        """Peak bytes as an expression in T, chunk, loss_chunk and the symbols of other sizes.

        The batch size is B if the schedule was made for a batch of two or more and no number is given. For
        sequences of more than one chunk; the last chunk, whose prefix is the longest, stands for all.
        """
        totals = (sympy.sympify(m.total) for m in self.timeline(self.symbols))
        found = sympy.Max(*largest(term for total in totals for term in _without_max(total)))
        return self.for_batch(found, batch_size)

    def for_batch(self, found: sympy.Expr, batch_size: int | None = None) -> sympy.Expr:
        """The batch size of each input has a symbol of its own; to people they are one: B, or a number."""
        others = {s: v for s, v in self.facts.values.items() if s != self.facts.sequence}
        same = len(set(others.values())) == 1
        return (
            found.subs(dict.fromkeys(others, BATCH if batch_size is None else batch_size)) if same else found
        )

    def _forward(self, ledger: Ledger, sizes: Sizes) -> Iterator[Moment]:
        for node in self.executor.whole.outputs:
            ledger.hold(("whole", _storage(node)), DATA, self.bytes_of(node, sizes))
        last = len(self.facts.segments) - 1
        for number, group in enumerate(self.executor.groups):
            self._leave(ledger, number - 2)
            for segment in group:
                runner = self.executor.runners[segment.index]
                if self.executor.one_sweep is not None and segment.index == last:
                    self._leave(ledger, number - 1)
                    yield from self._loss(ledger, sizes, segment, runner)
                else:
                    yield from self._segment_forward(ledger, sizes, segment, runner)
            self._drop_inner(ledger, group)
        for node in self.executor.tail.outputs:
            if shape_of(node):
                ledger.hold(("output", node), OUTPUTS, self.bytes_of(node, sizes))
        self._drop_unsaved(ledger)

    def _segment_forward(
        self, ledger: Ledger, sizes: Sizes, segment: Segment, runner: Any, phase: str = "forward"
    ) -> Iterator[Moment]:
        for node in segment.outputs:
            if ("value", node) not in ledger.held:
                cause = STORED if node in self.first_use else LOSS
                ledger.hold(("value", node), cause, self.bytes_of(node, sizes))
        states = self.states_of(runner)
        for state in states:
            ledger.hold(("state", state), STATE, self.bytes_of(state, sizes))
        yield from self._calls(phase, ledger, sizes, segment, runner, "forward")
        self._hold_kept(ledger, segment, sizes, sizes.tokens)
        ledger.drop(*(("state", s) for s in states))

    def _hold_kept(self, ledger: Ledger, segment: Segment, sizes: Sizes, rows: Any) -> None:
        """What is kept of attention for the first `rows` rows."""
        if segment.index not in self.kept_rows:
            nodes = attention_outputs(self.facts, segment) if self.options.save == "attention" else []
            each = (shape_of(n)[0] * sum(row_bytes_of_attention(n)) for n in nodes)
            self.kept_rows[segment.index] = sum(each, sympy.S.Zero)
        size = self.kept_rows[segment.index]
        if size != 0:
            ledger.hold(("kept", segment.index), KEPT, self.value(size, sizes) * rows)

    # ---- the memory policy, see `passes.policy`

    def _drop_inner(self, ledger: Ledger, group: list[Segment]) -> None:
        """Of several segments that keep their inputs together, nothing between them is kept."""
        if len(group) > 1:
            seen = set(self.executor.outputs_of(group))
            ledger.drop(*(("value", n) for s in group for n in s.outputs if n not in seen))
            ledger.drop(*(("kept", s.index) for s in group))

    def _kept_by(self, number: int) -> list[Any]:
        """Keys of what a group keeps, except what a later one keeps as well."""
        group = self.executor.groups[number]
        later = {n for g in self.executor.groups[number + 1 :] for s in g for n in s.rows}
        return [("value", n) for s in group for n in s.rows if n not in later] + [
            ("kept", s.index) for s in group
        ]

    def _leave(self, ledger: Ledger, number: int) -> None:
        """What a group keeps has left the device: while the next runs, it is on its way."""
        if number >= 0 and self.leaves:
            for key in self._kept_by(number):
                if key in ledger.held:
                    self.elsewhere[key] = ledger.held.pop(key)

    def _return(self, ledger: Ledger, number: int) -> None:
        """It is back for the group's backward, or on its way back."""
        if number >= 0 and self.leaves:
            for key in self._kept_by(number):
                if key in self.elsewhere:
                    ledger.held[key] = self.elsewhere.pop(key)

    @property
    def leaves(self) -> bool:
        """True if what is kept leaves the device."""
        return self.options.offload == "disk" or (self.options.offload == "host" and not self.on_host)

    def offloaded(self, sizes: Sizes) -> Any:
        """Bytes that lie in host memory or on disk at the end of the forward."""
        ledger = Ledger()
        for _ in self._forward(ledger, sizes):
            pass
        left, self.elsewhere = self.elsewhere, {}
        return sum(size for _, size in left.values())

    def _loss(
        self, ledger: Ledger, sizes: Sizes, segment: Segment, runner: SegmentRunner
    ) -> Iterator[Moment]:
        """Loss and gradient in one sweep, see `runtime.head`."""
        rows = segment.outputs[0]
        ledger.hold(("value", rows), LOSS, self.bytes_of(rows, sizes))
        ledger.hold("coefficients", LOSS, self.bytes_of(rows, sizes))
        self._hold_gradients(ledger, sizes, segment)
        yield from self._calls("forward", ledger, sizes, segment, runner, "loss")
        ledger.drop(("value", rows), "coefficients")

    def _drop_unsaved(self, ledger: Ledger) -> None:
        """After the forward only what a backward will read is held."""
        saved: set[Any] = set()
        for segment in self.facts.segments:
            if any(n in self.facts.needs_grad for n in segment.outputs):
                saved |= {("value", n) for n in segment.rows} | {
                    ("whole", _storage(n)) for n in segment.whole
                }
        gone = [
            k for k in ledger.held if isinstance(k, tuple) and k[0] in ("value", "whole") and k not in saved
        ]
        ledger.drop(*gone)

    def _backward(self, ledger: Ledger, sizes: Sizes) -> Iterator[Moment]:
        last = len(self.facts.segments) - 1
        for number in reversed(range(len(self.executor.groups))):
            group = self.executor.groups[number]
            self._return(ledger, number)
            self._return(ledger, number - 1)
            yield from self._again(ledger, sizes, group)
            for segment in reversed(group):
                runner = self.executor.runners[segment.index]
                if not any(n in self.facts.needs_grad for n in segment.outputs):
                    continue
                if self.executor.one_sweep is None or segment.index != last:
                    yield from self._segment_backward(ledger, sizes, segment, runner)
                self._finish(ledger, segment)

    def _again(self, ledger: Ledger, sizes: Sizes, group: list[Segment]) -> Iterator[Moment]:
        """The inputs between segments that keep only those of the first."""
        if len(group) == 1:
            return
        for segment in group if self.options.save == "attention" else group[:-1]:
            runner = self.executor.runners[segment.index]
            yield from self._segment_forward(ledger, sizes, segment, runner, "backward")
        inputs = {n for s in group for n in s.rows}
        ledger.drop(*(("value", n) for n in group[-1].outputs if n not in inputs))

    def _segment_backward(
        self, ledger: Ledger, sizes: Sizes, segment: Segment, runner: Any
    ) -> Iterator[Moment]:
        outputs = [n for n in segment.outputs if n in self.facts.needs_grad]
        for node in outputs:
            if ("gradient", node) not in ledger.held:
                ledger.hold(("gradient", node), HIDDEN, self.bytes_of(node, sizes))
        if isinstance(runner, Subgraph):
            yield self._moment("backward", ledger, sizes, segment, None, self.whole_cost(segment), "whole")
            self._hold_gradients(ledger, sizes, segment)
        else:
            if runner.can_overwrite():
                ledger.drop(("gradient", outputs[0]))
            states = self.states_of(runner)
            for state in states:
                ledger.hold(("state", state), STATE, self.bytes_of(state, sizes))
            if states:
                yield from self._calls("backward", ledger, sizes, segment, runner, "states")
            for state in states:
                ledger.hold(("state gradient", state), STATE_GRADIENTS, self.bytes_of(state, sizes))
            self._hold_gradients(ledger, sizes, segment)
            yield from self._calls("backward", ledger, sizes, segment, runner, "joint")
            ledger.drop(*((k, s) for s in states for k in ("state", "state gradient")))
        ledger.drop(("kept", segment.index))
        ledger.drop(*(("gradient", n) for n in outputs))

    def _hold_gradients(self, ledger: Ledger, sizes: Sizes, segment: Segment) -> None:
        """Buffers of the gradients that a segment's backward makes."""
        for node in (n for n in segment.rows if n in self.facts.needs_grad):
            key = ("gradient", node)
            if key in ledger.held:
                key = ("sum of gradients", node)
            ledger.hold(key, HIDDEN, self.bytes_of(node, sizes))
        for node in (n for n in segment.constants if n in self.facts.needs_grad):
            ledger.hold(("parameter", node, segment.index), PARAMETERS, self.bytes_of(node, sizes))

    def _finish(self, ledger: Ledger, segment: Segment) -> None:
        """After a segment's backward: what nobody reads any more, and gradients that are complete."""
        for node in (*segment.rows, *segment.whole):
            ledger.drop(("sum of gradients", node))
            if self.first_use[node] == segment.index:
                ledger.drop(("value", node))
        wholes = {_storage(n) for s in self.facts.segments[: segment.index] for n in s.whole}
        ledger.drop(*(("whole", _storage(n)) for n in segment.whole if _storage(n) not in wholes))
        for node in segment.constants:
            parts = [k for k in ledger.held if isinstance(k, tuple) and k[:2] == ("parameter", node)]
            ledger.drop(*(parts if self.first_use[node] == segment.index else parts[1:]))

    # ---- one segment

    def states_of(self, runner: Any) -> list[Node]:
        if isinstance(runner, Subgraph):
            return []
        return [s.node for s in runner.programs.states.values()]

    def _calls(
        self, phase: str, ledger: Ledger, sizes: Sizes, segment: Segment, runner: Any, kind: str
    ) -> Iterator[Moment]:
        if isinstance(runner, Subgraph):
            yield self._moment(phase, ledger, sizes, segment, None, self.whole_cost(segment, False), "whole")
            return
        extents = list(enumerate(self._extents(runner, sizes)))
        for index, extent in reversed(extents) if kind == "joint" else extents:
            if kind == "forward":
                self._hold_kept(ledger, segment, sizes, extent.start)
            cost = self._program(runner, kind, extent, sizes)
            yield self._moment(phase, ledger, sizes, segment, (index, extent), cost, kind)

    def _moment(
        self,
        phase: str,
        ledger: Ledger,
        sizes: Sizes,
        segment: Segment,
        at: tuple[int, Any] | None,
        cost: ProgramCost,
        kind: str,
    ) -> Moment:
        index, extent = at if at is not None else (None, None)
        cause = LOSS if segment.index == len(self.facts.segments) - 1 and not segment.mixings else BODIES
        peak = self.value(cost.peak, sizes, extent)
        held = ledger.bytes((cause, peak))
        return Moment(phase, segment.index, index, kind, held, self.value(cost.flops, sizes, extent))

    def _extents(self, runner: SegmentRunner, sizes: Sizes) -> list[Any]:
        rows = sizes.chunk if runner.segment.mixings else sizes.loss_chunk
        if not sizes.symbolic:
            return runner.extents_of(sizes.tokens, rows)
        total = sizes.tokens - runner.segment.removed
        prefix = total - rows if runner.segment.mixings else 0
        window = runner.segment.window
        low = 0 if runner.segment.mixings else total - rows
        if window is not None:
            prefix = int(window) - 1
            low = total - rows - prefix
        return [Extent(rows, prefix, low, total, runner.segment.reach.name == "FULL")]

    def _program(self, runner: SegmentRunner, kind: str, extent: Extent, sizes: Sizes) -> ProgramCost:
        plain = frozenset(m for m, own in runner.model_masks.items() if own in self.plain)
        numbers = extent
        if sizes.symbolic:
            window = runner.segment.window
            prefix = 0 if not runner.segment.mixings else int(window) - 1 if window is not None else SAMPLE
            numbers = Extent(SAMPLE, prefix, 0, SAMPLE + prefix, extent.full)
        own = numbers.own() if kind == "states" and extent.full and not runner.segment.chained else numbers
        key = (id(runner.programs), kind, plain, own.pattern)
        if key not in self._programs:
            self._programs[key] = _cost_of(runner, self.facts, kind, plain, own)
        return self._programs[key]

    def whole_cost(self, segment: Segment, backward: bool = True) -> ProgramCost:
        """Cost of a segment that runs whole: forward and VJP, or the forward alone."""
        key = ("whole", segment.signature, backward)
        if key not in self._programs:
            module, values = joint_program(self.facts, self.executor.runners[segment.index], backward)
            names = {self.facts.sequence: TOKENS} if self.facts.sequence is not None else {}
            self._programs[key] = program_cost(module, names, values)
        return self._programs[key]

    def joint_cost(self, segment: Segment, backward: bool = True) -> ProgramCost:
        """Cost of a segment's forward and VJP, or of its forward, over the whole sequence at once: eager."""
        runner = self.executor.runners[segment.index]
        if isinstance(runner, Subgraph):
            return self.whole_cost(segment, backward)
        key = (id(runner.programs), "at once", backward)
        if key not in self._programs:
            programs = runner.programs
            extent = Extent(SAMPLE, 0, 0, SAMPLE, segment.reach.name == "FULL")
            plain = frozenset(m for m, own in runner.model_masks.items() if own in self.plain)
            kind = "joint" if backward else "forward"
            traced = programs.traced(kind, plain, extent, _numbers(self.facts, runner, extent))
            names = _names(runner, traced.guards.names)
            names = {k: TOKENS if name is ROWS else name for k, name in names.items()}
            self._programs[key] = program_cost(traced.module, names, traced.values if backward else None)
        return self._programs[key]

    # ---- sizes

    def bytes_of(self, node: Node, sizes: Sizes) -> Any:
        value = tensors_of(node)[0]
        return self.value(sympy.Mul(*shape_of(node)) * value.element_size(), sizes)

    def value(self, size: sympy.Expr, sizes: Sizes, extent: Any = None) -> Any:
        """A size of the graph or of a program, as a number or in the symbols of the step."""
        env = {self.facts.sequence: sizes.tokens, TOKENS: sizes.tokens, **sizes.others}
        if extent is not None:
            env |= {ROWS: extent.rows, PREFIX: extent.prefix, LOW: extent.low, TOTAL: extent.total}
        if sizes.symbolic:
            return size.subs(env) if not size.is_Integer else size
        function = self._numbers.get(size)
        symbols = sorted(size.free_symbols, key=str)
        if function is None:
            function = self._numbers[size] = sympy.lambdify(symbols, size, "math")
        return int(function(*(env[s] for s in symbols)))


def _without_max(total: sympy.Expr) -> list[sympy.Expr]:
    """The sums of which a sum with maxima in it is the largest."""
    for part in total.atoms(sympy.Max):
        return [t for choice in part.args for t in _without_max(total.subs(part, choice))]
    return [total]


def _cost_of(
    runner: SegmentRunner, facts: Facts, kind: str, plain: frozenset[Node], extent: Extent
) -> ProgramCost:
    lowered = runner.programs.get(kind, plain, extent, _numbers(facts, runner, extent))
    return program_cost(lowered.module, _names(runner, lowered.sizes))


def _numbers(facts: Facts, runner: SegmentRunner, extent: Extent) -> list[Any]:
    """The numbers at the front of a program's inputs."""
    return [*extent.sizes, 0, *(facts.values.get(s, 2) for s in runner.programs.symbols)]


def _names(runner: SegmentRunner, sizes: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, sympy.Expr]:
    """What the size symbols of a program are called here."""
    known = {"rows": ROWS, "prefix": PREFIX, "low": LOW, "total": TOTAL}
    known |= {str(s): s for s in runner.programs.symbols}
    return {symbol: known[name] for symbol, name in sizes.items() if name in known}


def _unpadded(executor: Executor) -> frozenset[Node]:
    """Masks of which nothing but causality is left where no token is padding."""
    found = ((m, mask_facts(executor.facts, m)) for m in executor.masks)
    return frozenset(m for m, known in found if known.plain_without_data and not known.has_bias)


def _storage(node: Node) -> int:
    return tensors_of(node)[0].untyped_storage()._cdata
