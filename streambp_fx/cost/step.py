"""Memory and work of one training step: what the runtime holds when, from the schedule and its programs.

The step program is walked as the runtime runs it (`step_walk`). Where it calls a program, the program's own
bytes come from liveness over its graph (`passes.cost.program`). With numbers for the sizes the result is a
timeline; with symbols it is an expression in the sequence length, the batch size and the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import sympy

from ..options import Options
from ..passes.cost.program import largest
from ..passes.graph.facts import Facts, Segment
from ..passes.s3_cut.policy import Policy
from ..passes.s6_schedule.offloading import moved
from ..passes.s6_schedule.own_rows import segments_for_blocks
from ..passes.s6_schedule.program import StepProgram
from ..passes.s6_schedule.program.values import ValueKind
from ..passes.s6_schedule.rows_elsewhere import rows_elsewhere
from ..passes.step.instructions import BufferKind
from ..passes.step.procedure import Procedure
from ..runtime.executor import Executor
from .held_bytes import BATCH, CHUNK, LOSS_CHUNK, TOKENS, Moment, Sizes
from .programs import ProgramCosts
from .step_walk import StepWalk


class StepCost(ProgramCosts):
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
        super().__init__(facts, Executor(facts, options) if executor is None else executor, known)
        self.options = options

    def storing(self, policy: Policy) -> StepCost:
        """The cost with another memory policy."""
        options = self.options.storing(policy)
        found = StepCost(self.facts, options, self.executor.storing(policy), self)
        found.devices = self.devices
        return found

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
        return list(StepWalk(self, self.step_of(sizes), sizes).moments())

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

    @cached_property
    def step_program(self) -> StepProgram:
        """The step of a batch without padding, as long as the one that was captured."""
        return self.step_of(self.symbols)

    def step_of(self, sizes: Sizes) -> StepProgram:
        """The step of a batch without padding; symbols are taken to be what they were in the capture."""
        if self.devices > 1:
            return self._shared_program(sizes)
        if sizes.symbolic:
            sizes = self.sizes(self.facts.values[self.facts.sequence])  # type: ignore[index]
        values = {**self.facts.values, **sizes.others, self.facts.sequence: sizes.tokens}
        kept_states = self.executor.segments_keeping_states(sizes.chunk, values)
        full = self.executor.segments_where(self.is_full)
        return self.executor.step_program(full, kept_states=kept_states)

    def along(self, devices: int) -> StepCost:
        """The cost on one of so many devices, over which the rows of each sequence are distributed."""
        executor = Executor(self.facts, self.options, self.executor.programs, shared=devices > 1)
        found = StepCost(self.facts, self.options, executor, self)
        found.devices = devices
        return found

    def _shared_program(self, sizes: Sizes) -> StepProgram:
        """The same on one of several devices, each of which runs its own rows."""
        wanted = segments_for_blocks(self.executor.parts, self.devices)
        by_blocks = self.executor.segments_where(
            lambda r: r.segment.index in wanted and self.reads_by_blocks(r, sizes)
        )
        full = self.executor.segments_where(self.is_full)
        return self.executor.step_program(full, several=True, by_blocks=by_blocks)

    def procedures(self, segment: Segment) -> list[Procedure]:
        """What runs a segment, once each; nothing of one that runs unchunked."""
        calls = (c for c in self.step_program.calls() if c.segment == segment.index)
        return list({c.procedure_name: c.procedure for c in calls}.values())

    def saved_of(self, segment: Segment) -> dict[str, int]:
        """What a segment saves for its backward besides its inputs: bytes a row of all samples, by name.

        Of the rows of which most is saved.
        """
        runner = self.executor.runners[segment.index]
        forwards = [p for p in self.procedures(segment) if p.name == "forward"] if runner is not None else []
        runs = [run for p in forwards for _, run in p.runs() if run.price is not None]
        if runner is None or not runs:
            return {}
        sizes = self.sizes(self.facts.values[self.facts.sequence])  # type: ignore[index]
        saved = [self.saved_by(runner, run, sizes) for run in runs]
        return max(saved, key=lambda found: sum(found.values()), default={})

    def shares_saved(self, segment: Segment) -> dict[str, tuple[int, Fraction]]:
        """What a segment saves for its backward besides its inputs, by name.

        Returns:
            bytes a row of all samples, and the share of the rows of which it is saved.
        """
        runner = self.executor.runners[segment.index]
        found: dict[str, tuple[int, Fraction]] = {}
        if runner is None:
            return found
        sizes = self.sizes(self.facts.values[self.facts.sequence])  # type: ignore[index]
        forwards = [p for p in self.procedures(segment) if p.name == "forward"]
        for loop, run in (r for p in forwards for r in p.runs() if r[1].price is not None):
            first, last = loop.share
            for name, size in self.saved_by(runner, run, sizes).items():
                found[name] = size, found.get(name, (0, Fraction(0)))[1] + last - first
        return found

    def bytes_of_kept_states(self, sizes: Sizes) -> dict[int, Any]:
        """By segment, bytes of the states of recurrences that it keeps for the backward."""
        found: dict[int, Any] = {}
        for call in self.step_of(sizes).calls():
            if call.procedure_name == "forward" and call.way.keeps_states:
                runner, states = self.executor.runners[call.segment], call.programs.buffers(BufferKind.STATE)
                assert runner is not None
                own = (self.bytes_by_chunk(runner, b, sizes) for b in states if b.by_chunk)
                found[call.segment] = sum(own)
        return found

    def offloaded(self, sizes: Sizes) -> Any:
        """Bytes that lie in host memory or on disk at the end of the forward."""
        program = self.step_of(sizes)
        walk = StepWalk(self, program, sizes)
        by_chunks = (v for v in rows_elsewhere(program) if v.kind is ValueKind.CAPTURED)
        return sum(walk.bytes_of(value) for value in (*moved(program), *by_chunks))


def _without_max(total: sympy.Expr) -> list[sympy.Expr]:
    """The sums of which a sum with maxima in it is the largest."""
    for part in total.atoms(sympy.Max):
        return [t for choice in part.args for t in _without_max(total.subs(part, choice))]
    return [total]
