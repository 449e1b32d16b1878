"""Memory and work of one training step: what the runtime holds when, from the schedule and its programs.

The step is walked as the runtime runs it. Where the walk calls a program, the program's own bytes come from
liveness over its graph (`passes.cost`). With numbers for the sizes the result is a timeline; with symbols it
is an expression in the sequence length, the batch size and the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import sympy
from torch.fx import Node

from .ledger import (
    BATCH,
    CHUNK,
    DATA,
    HIDDEN,
    LOSS,
    LOSS_CHUNK,
    OUTPUTS,
    PARAMETERS,
    TOKENS,
    Ledger,
    Moment,
    Sizes,
)
from .options import Options
from .passes.cost import largest
from .passes.extract import Subgraph
from .passes.ir import Facts, Segment, shape_of, tensors_of
from .passes.policy import Policy, rows_from_outside
from .procedure_costs import ProcedureCosts
from .runtime.executor import Executor
from .runtime.streamed import SegmentRunner


class StepCost(ProcedureCosts):
    """Cost of one training step of a schedule.

    Args:
        facts: facts of the graph.
        options: how it is streamed.
        executor: the compiled graph, if there is one: its programs need not be traced again.
        known: the cost of the same graph with another memory policy: what both have in common is not counted
            again.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        executor: Executor | None = None,
        known: StepCost | None = None,
    ) -> None:
        super().__init__(facts, options, Executor(facts, options) if executor is None else executor, known)
        self.elsewhere: dict[Any, tuple[str, Any]] = {}
        on_cpu = all(v.device.type == "cpu" for n in facts.parameters for v in tensors_of(n))
        self.on_host = on_cpu and not facts.placeless

    def storing(self, policy: Policy) -> StepCost:
        """The cost with another memory policy."""
        options = self.options.storing(policy)
        return StepCost(self.facts, options, Executor(self.facts, options, self.executor.programs), self)

    # ---- the step

    def sizes(
        self,
        tokens: int,
        chunk: int | None = None,
        others: Mapping | None = None,
        loss_chunk: int | None = None,
    ) -> Sizes:
        """Sizes as numbers; chunks are those of the options if they are not given."""
        rows = self.options.rows if chunk is None else chunk
        values = {s: v for s, v in self.facts.values.items() if s != self.facts.sequence}
        values.update(others or {})
        loss_rows = loss_chunk or self.options.loss_rows(self.executor.sequences(values))
        return Sizes(tokens, rows, loss_rows, values)

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

    def flops_expression(self, batch_size: int | None = None) -> sympy.Expr:
        """Floating-point operations of a step, of products and attention, in the same symbols.

        Chunks are taken to be of full length; with a window, all chunks read one of full length.
        """
        total = sympy.Add(*(sympy.sympify(m.flops) for m in self.timeline(self.symbols)))
        return sympy.expand(self.for_batch(total, batch_size))

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
        if isinstance(runner, Subgraph):
            for node in segment.outputs:
                self._hold_output(ledger, sizes, node)
            yield self._whole_moment(phase, ledger, sizes, segment, False)
        else:
            yield from self._walk("forward", phase, ledger, sizes, runner)
        self._hold_kept(ledger, segment, sizes, sizes.tokens)

    # ---- the memory policy, see `passes.policy`

    def _drop_inner(self, ledger: Ledger, group: list[Segment]) -> None:
        """Of several segments that keep their inputs together, nothing between them is kept."""
        if len(group) > 1:
            seen = set(self.executor.outputs_of(group))
            ledger.drop(*(("value", n) for s in group for n in s.outputs if n not in seen))
            ledger.drop(*(("kept", s.index) for s in group))

    def _kept_by(self, number: int) -> list[tuple[str, Any]]:
        """Keys of what a group keeps, except what a later one keeps as well."""
        groups = self.executor.groups if self.executor.one_sweep is None else self.executor.groups[:-1]
        if number >= len(groups):
            return []
        group = groups[number]
        later = {n for g in groups[number + 1 :] for s in g for n in s.rows}
        rows = [n for n in rows_from_outside(group) if n not in later and n.op != "placeholder"]
        kept = [("kept", s.index) for s in group if len(group) == 1]
        return [*(("value", n) for n in rows), *kept]

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
        groups = range(len(self.executor.groups)) if self.leaves else ()
        return sum(self._kept_bytes(*key, sizes) for number in groups for key in self._kept_by(number))

    def _kept_bytes(self, kind: str, of: Any, sizes: Sizes) -> Any:
        if kind == "value":
            return self.bytes_of(of, sizes)
        return self.value(self._kept_row(self.facts.segments[of]), sizes) * sizes.tokens

    def _loss(
        self, ledger: Ledger, sizes: Sizes, segment: Segment, runner: SegmentRunner
    ) -> Iterator[Moment]:
        """Loss and gradient in one sweep, see `runtime.head`."""
        rows = segment.outputs[0]
        ledger.hold(("gradient", rows), LOSS, self.bytes_of(rows, sizes))
        yield from self._walk("loss", "forward", ledger, sizes, runner)
        ledger.drop(("value", rows), ("gradient", rows))

    def _drop_unsaved(self, ledger: Ledger) -> None:
        """After the forward only what a backward will read is held."""
        saved: set[Any] = set()
        for segment in self.facts.segments:
            if self.facts.trains(segment):
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
                if not self.facts.trains(segment):
                    continue
                if self.executor.one_sweep is None or segment.index != last:
                    yield from self._segment_backward(ledger, sizes, segment, runner)
                else:
                    yield from self._walk("scaling", "backward", ledger, sizes, runner)
                self._finish(ledger, sizes, segment)

    def _again(self, ledger: Ledger, sizes: Sizes, group: list[Segment]) -> Iterator[Moment]:
        """The inputs between segments that keep only those of the first."""
        if len(group) == 1:
            return
        for segment in group if self.options.save == "attention" else group[:-1]:
            runner = self.executor.runners[segment.index]
            for moment in self._segment_forward(ledger, sizes, segment, runner, "backward"):
                yield replace(moment, segment=group[-1].index)  # it is the backward of that one that waits
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
            yield self._whole_moment("backward", ledger, sizes, segment, True)
            for node in (n for n in segment.rows if n in self.facts.needs_grad):
                self._hold_gradient(ledger, sizes, node)
            for node in (n for n in segment.constants if n in self.facts.needs_grad):
                ledger.hold(("parameter", node, segment.index), PARAMETERS, self.bytes_of(node, sizes))
        else:
            yield from self._walk("backward", "backward", ledger, sizes, runner)
        ledger.drop(("kept", segment.index))
        ledger.drop(*(("gradient", n) for n in outputs))

    def _finish(self, ledger: Ledger, sizes: Sizes, segment: Segment) -> None:
        """After a segment's backward: what nobody reads any more, and gradients that are complete."""
        for node in (*segment.rows, *segment.whole):
            ledger.drop(("sum of gradients", node))
            if self.first_use[node] == segment.index:
                ledger.drop(("value", node))
        wholes = {_storage(n) for s in self.facts.segments[: segment.index] for n in s.whole}
        ledger.drop(*(("whole", _storage(n)) for n in segment.whole if _storage(n) not in wholes))
        for node in segment.constants:
            parts = [k for k in ledger.held if isinstance(k, tuple) and k[:2] == ("parameter", node)]
            ledger.drop(*parts)
            if parts and self.first_use[node] != segment.index:  # others will be added
                ledger.hold(parts[0], PARAMETERS, self.bytes_of(node, sizes))

    def _whole_moment(
        self, phase: str, ledger: Ledger, sizes: Sizes, segment: Segment, backward: bool
    ) -> Moment:
        cost = self.whole_cost(segment, backward)
        held = ledger.bytes((self._cause(segment), self.value(cost.peak, sizes)))
        return Moment(phase, segment.index, None, "whole", held, self.value(cost.flops, sizes))


def _without_max(total: sympy.Expr) -> list[sympy.Expr]:
    """The sums of which a sum with maxima in it is the largest."""
    for part in total.atoms(sympy.Max):
        return [t for choice in part.args for t in _without_max(total.subs(part, choice))]
    return [total]


def _storage(node: Node) -> int:
    return tensors_of(node)[0].untyped_storage()._cdata
