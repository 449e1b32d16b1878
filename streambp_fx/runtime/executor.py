"""Runs a compiled graph: whole values, segments in order, epilogue, what is written back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..options import Options
from ..passes.graph.facts import Facts, PassError, tensors_of
from ..passes.s2_prove.independent_samples import batch_size
from ..passes.s3_cut.policy import Policy, as_checked
from ..passes.s3_cut.segment import sequences
from ..passes.s5_lower.programs import SegmentPrograms
from ..passes.s6_schedule.build import schedule
from ..passes.s6_schedule.checker import UnsoundStep
from ..passes.s6_schedule.kept_states import segments_with_small_states
from ..passes.s6_schedule.own_rows import segments_for_blocks
from ..passes.s6_schedule.program import StepProgram
from ..passes.s6_schedule.step_parts import Making, Programs, StepParts
from ..passes.s6_schedule.transforms import transformed
from .asked_gradients import Answers, where_asked
from .offload import Store, store_for
from .padding import Padding
from .result_layout import ResultLayout
from .segments.failures import compile_error
from .segments.loss_head import Sweep, sweep_of
from .segments.owned_buffers import OwnedBuffers, attribute
from .segments.questions_to_data import FlagQuestions, MaskQuestions, Questions
from .segments.segment_runner import SegmentRunner
from .segments.step_blocks import StepData
from .several_devices.sharded_parameters import GraphGroups, StepGroups
from .several_devices.sharing import Sharing
from .step_interpreter import StepFrame, run_step, value_of
from .step_kinds import Draws, Prepared, StepKind, step_kind
from .step_sizes import SizesDiffer, read_sizes, size_places, tests_of_sizes
from .written_inputs import WrittenInputs


class Executor:
    """The compiled form of one captured graph; called with the graph's inputs.

    Args:
        facts: facts of the graph after the segment pass.
        options: `chunk` rows of a chunk, `loss_chunk` rows where a segment carries no state (the loss head),
            `logits` for the outputs in `facts.lazy`.
        programs: programs of another executor of the same graph, to be used again where they are the same.
        stored: parameters that are there only while a step has taken them, see `sharded_parameters`.
        shared: rows of a sequence lie on several devices, as with `mesh`.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        programs: Programs | None = None,
        stored: GraphGroups | None = None,
        shared: bool = False,
    ) -> None:
        self.facts, self.options, self._sequences = facts, options, sequences(facts)
        self.shared = shared or (options.mesh is not None and options.mesh.size() > 1)
        self.batch = batch_size(facts)
        self.programs: Programs = {} if programs is None else programs
        self.stored = stored
        self.group_of = {n: k for k, group in enumerate(facts.parameter_groups) for n in group}
        self.placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        self.constants = {n: attribute(facts, n) for n in facts.nodes if n.op == "get_attr"}
        self.results, self.written = facts.results, WrittenInputs(facts)
        self.sizes_at = size_places(facts)
        self.guards = tests_of_sizes(facts)
        self.contiguous_at = _contiguous_at(self)
        self.layout = ResultLayout(facts)
        # Of the largest step so far: tokens of a sequence, rows of a chunk, other sizes.
        self.largest: tuple[int, int, tuple[tuple[sympy.Symbol, int], ...]] | None = None
        self.policy, self.wide = options.stored, options.accumulate == "float32"
        lazy, body, wide = options.logits == "lazy", options.body, options.accumulate
        making = Making(body, self.policy, wide, lazy, options.exchange, self.shared)
        self.parts = StepParts(facts, making, self.programs)
        self.runners = [
            SegmentRunner(facts, s, own) if isinstance(own, SegmentPrograms) else None
            for s, own in zip(facts.segments, self.parts.segments, strict=True)
        ]
        self.asked, self.flags = MaskQuestions(facts, self.parts.masks), FlagQuestions(facts)
        self.padding = Padding(self)
        self._steps: dict[tuple, StepProgram] = {}
        self.shares = Sharing(options.mesh, facts, self.runners, self.parts.random)

    @property
    def sweeps(self) -> int:
        """How many sweeps over the loss head a training step takes: 1 or 2, or 0 if the graph has no loss."""
        if self.parts.one_sweep is not None:
            return 1
        return 2 if any(n in self.facts.needs_grad for n in self.parts.epilogue.outputs) else 0

    def step_program(
        self,
        full: frozenset[int] = frozenset(),
        training: bool = True,
        left_out: bool = False,
        several: bool = False,
        kept_states: frozenset[int] = frozenset(),
        by_blocks: frozenset[int] = frozenset(),
        seeds: tuple[Node, ...] | None = None,
    ) -> StepProgram:
        """The instructions of a step, checked; made once for each kind of step.

        Args:
            full: segments of which some row may read all rows.
            training: there is a backward.
            left_out: some rows of some samples are not run.
            several: each of several devices runs its own rows.
            kept_states: segments that keep the states of recurrences, see `kept_states`.
            by_blocks: segments whose chunks read columns of other devices block by block.
            seeds: results to which the caller has gradients, see `schedule`.

        Raises:
            CompileError: what was made is wrong.
        """
        key = full, training, seeds, left_out, several, kept_states, by_blocks
        if key not in self._steps:
            try:
                made = transformed(schedule(self.parts, *key[:3]), self.parts, *key[3:])
            except PassError as error:
                raise compile_error(error) from error
            except UnsoundStep as error:
                raise compile_error(PassError("schedule", error)) from error
            self._steps[key] = made
        return self._steps[key]

    def program_of(self, step: StepData) -> StepProgram:
        """The instructions of a step."""
        full = self.segments_where(lambda runner: runner.is_full(step))
        left_out, several = step.needed is not None, step.own is not None
        keeps = step.training and not several
        kept_states = self.segments_keeping_states(step.chunk, step.sizes) if keeps else frozenset[int]()
        return self.step_program(full, step.training, left_out, several, kept_states, step.by_blocks)

    def segments_keeping_states(self, rows: int, sizes: Mapping[sympy.Symbol, int]) -> frozenset[int]:
        """Segments that keep the states of recurrences in a training step on one device.

        Args:
            rows: of a chunk.
            sizes: of all size symbols.
        """
        return segments_with_small_states(self.parts, rows, sizes)

    def _segments_by_blocks(self, step: StepData) -> frozenset[int]:
        """Segments whose chunks read columns of other devices block by block."""
        assert step.own is not None
        wanted = segments_for_blocks(self.parts, step.own.devices)
        return self.segments_where(lambda r: r.segment.index in wanted and r.may_read_by_blocks(step))

    def segments_where(self, holds: Callable[[SegmentRunner], bool]) -> frozenset[int]:
        """Of the segments that are run by chunks, the indices of those for which something holds."""
        return frozenset(k for k, r in enumerate(self.runners) if r is not None and holds(r))

    @functools.cached_property
    def checked_policy(self) -> Policy:
        """The policy under which steps like this one's are checked, see `as_checked`."""
        return as_checked(self.policy, self.facts)

    def storing(self, policy: Policy) -> Executor:
        """The executor with this memory policy: this one, or for a check another one."""
        if policy == self.policy:
            return self
        return Executor(self.facts, self.options.storing(policy), self.programs, self.stored, self.shared)

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """True if what the graph's capture assumed about sizes holds for these inputs."""
        try:
            sizes = self.sizes(inputs)
        except SizesDiffer:
            return False
        return all(test(*(sizes[s] for s in symbols)) for symbols, test in self.guards)

    def tokens(self, inputs: Sequence[Any]) -> int:
        """Tokens of a sequence."""
        return self.sizes(inputs)[self.facts.sequence]  # type: ignore[index]

    def __call__(
        self,
        *inputs: Any,
        rows: int | None = None,
        loss_rows: int | None = None,
        first: Callable[[StepKind], None] | None = None,
    ) -> list[Any]:
        """Run a step.

        Args:
            inputs: those of the graph.
            rows, loss_rows: of a chunk of a layer and of the loss head, where they are chosen for the step.
            first: called with the kind of a training step before it runs; if it raises, the random state is
                what it was.
        """
        draws = Draws(inputs) if self.parts.random and first is not None else None
        groups = self._take_held()
        with torch._C._DisableAutocast():  # its casts are ops of the graph
            prepared = self._prepared(self._laid_out(self.written.copied(inputs)), rows, loss_rows)
        if first is not None and prepared.step.training:
            try:
                first(self._kind_of(prepared))
            except BaseException:
                if draws is not None:
                    draws.restore()
                raise
        with torch._C._DisableAutocast():
            results = self._run_step(prepared, groups)
        return self.written.write(inputs, results)

    def kind(self, inputs: Sequence[Any], rows: int, loss_rows: int) -> StepKind:
        """The kind of a training step with these chunks; it is not run."""
        with torch._C._DisableAutocast():
            prepared = self._prepared(self._laid_out(self.written.copied(inputs)), rows, loss_rows)
        return self._kind_of(prepared)

    def _kind_of(self, prepared: Prepared) -> StepKind:
        calls, masks = self.program_of(prepared.step).calls(), self.parts.masks
        policy = self.checked_policy
        return step_kind(calls, self.runners, masks, policy, prepared.step, prepared.sweep)

    def _laid_out(self, inputs: tuple) -> tuple:
        """Inputs in the order in memory that the programs take them to have."""
        given = list(inputs)
        for position in self.contiguous_at:
            given[position] = given[position].contiguous()
        return tuple(given)

    def _prepared(self, inputs: tuple, rows: int | None, loss_rows: int | None) -> Prepared:
        """Ask the data what decides how the step runs: in time linear in the sequence."""
        values, sizes = self.begin(inputs)
        chosen = f"{rows or self.options.rows} {self.policy}"
        exchanged = f"{self.policy.every} {self.options.exchange}"
        alike = self.shares.agree(inputs, chosen, exchanged, stored=self.stored is not None)
        step, questions = self._step(sizes, rows, loss_rows), Questions()
        self._note(step)
        fetch = functools.partial(self.value, values=values, sizes=sizes)
        self.asked.ask(questions, fetch)
        if step.training:
            self.flags.ask(questions, inputs)
        sweep = self._sweep(values, sizes, step, questions)
        if sweep is not None and sweep.unread is not None and self.parts.runs_to_the_end is None:
            self.asked.ask_where_it_counts(questions, fetch, sweep.unread)
        step.plain, step.full = self.asked.plain(questions), self.asked.full(questions)
        step.empty_rows, step.flags = self.asked.empty_rows(questions), self.flags.answers(questions)
        if alike and step.own is not None:
            step.by_blocks = self._segments_by_blocks(step)
        if sweep is not None:
            sweep.learn(questions)
            self.padding.leave_out(step, sweep, self.asked.plain_where_it_counts(questions))
        return Prepared(inputs, values, sizes, step, sweep)

    def _take_held(self) -> StepGroups | None:
        """Groups of parameters that are read between the segments are there before anything is asked."""
        groups = None if self.stored is None else self.stored.in_step(self.parts.forward_only_groups)
        if groups is not None:
            groups.hold(self.parts.held_groups)
        return groups

    def _run_step(self, prepared: Prepared, groups: StepGroups | None) -> list[Any]:
        step, program = prepared.step, self.program_of(prepared.step)
        values, answers = self._where_asked(prepared.values, step)
        frame = self.frame(values, prepared.sizes, step, program)
        frame.sweep, frame.store = prepared.sweep, self._store(prepared.values)
        frame.groups, frame.group_of, frame.stored = groups, self.group_of, self.stored
        frame.anew = lambda instruction: self.padding.completion(instruction.part, prepared.inputs, step)
        if step.own is not None:
            self.shares.prepare(frame)
        elif self.layout.gone_on_from and torch.is_grad_enabled():
            frame.lay_out = self.layout.lay_out
        if groups is not None:
            groups.will_take(program.taken_forward)
        run_step(program.forward, frame)
        results = [self.shares.result(n, frame) if isinstance(n, Node) else n for n in self.results]
        answers.held = results[len(results) - len(self.facts.asked) :]
        del results[len(results) - len(self.facts.asked) :]
        count = len(self.facts.outputs)
        results[:count] = self.layout.apply(results[:count], frame)
        for position, made in frame.lazy.items():
            results[position] = made
        if groups is not None:
            groups.returned(results)
        return results

    def _where_asked(self, values: dict[Node, Any], step: StepData) -> tuple[dict[Node, Any], Answers]:
        """Values of which those have a gradient that eager gives one, see `asked_gradients`."""
        asked = self.facts.where_asked and step.training and self.stored is None
        return where_asked(self.facts, values) if asked else (values, Answers())

    def frame(
        self, values: dict[Node, Any], sizes: Mapping[sympy.Symbol, int], step: StepData, program: StepProgram
    ) -> StepFrame:
        """What a step program runs in."""
        return StepFrame(self.facts, self.runners, program, step, values, sizes, random=self.parts.random)

    # ---- parts of a step

    def _note(self, step: StepData) -> None:
        if not step.training:
            return
        others = tuple((s, v) for s, v in step.sizes.items() if s != self.facts.sequence)
        noted = (step.total, step.chunk, others)
        if self.largest is None or tokens_of(noted) > tokens_of(self.largest):
            self.largest = noted

    def sequences(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        """How many sequences there are, from the values of the size symbols."""
        return int(self._sequences.subs(sizes))

    def sizes(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of each size symbol."""
        return read_sizes(self.sizes_at, inputs)

    def value(self, node: Node, values: dict[Any, Any], sizes: dict[sympy.Symbol, int]) -> Any:
        """A value of the step, or a size as a number."""
        return value_of(node, values, sizes)

    def begin(self, inputs: Sequence[Any]) -> tuple[dict[Any, Any], dict[sympy.Symbol, int]]:
        """The values that a step begins with, whole values among them, and the sizes."""
        values: dict[Any, Any] = dict(zip(self.placeholders, inputs, strict=True))
        values.update(self.constants)
        sizes = self.sizes(inputs)
        part = self.parts.whole
        with torch.no_grad():
            found = part.module(*(self.value(n, values, sizes) for n in part.inputs))
        values.update(zip(part.outputs, found, strict=True))
        return values, sizes

    def _step(self, sizes: dict[sympy.Symbol, int], rows: int | None, loss_rows: int | None) -> StepData:
        """A step of which nothing is known but its sizes."""
        seed = int(torch.randint(0, 2**40, (), device="cpu")) if self.parts.random else 0
        total = sizes[self.facts.sequence]  # type: ignore[index]
        training = torch.is_grad_enabled()
        chunks = rows or self.options.rows, loss_rows or self.options.loss_rows(self.sequences(sizes))
        own = self.shares.rows(total)
        return StepData(sizes, total, seed, OwnedBuffers(), *chunks, training, batch=self.batch, own=own)

    def _store(self, values: dict[Any, Any]) -> Store | None:
        """Where what is saved lies until the backward, if not where it is."""
        if self.policy.offload == "none" or not torch.is_grad_enabled():
            return None
        resident = [v for v in values.values() if isinstance(v, Tensor)]
        return store_for(self.policy.offload, resident[0].device, resident)

    def _sweep(
        self, values: dict[Any, Any], sizes: dict[sympy.Symbol, int], step: StepData, questions: Questions
    ) -> Sweep | None:
        """The sweep over the loss head, if there is one only. It asks what the step need not run."""
        part, position = self.parts.epilogue, self.parts.one_sweep
        if position is None or not step.training:
            return None
        segment, runner = self.facts.segments[-1], self.runners[-1]
        assert runner is not None
        whole = {k: v for k, v in values.items() if k in part.inputs}

        def epilogue(rows: Tensor) -> Any:
            local = {**whole, segment.outputs[0]: rows}
            return part.module(*(self.value(n, local, sizes) for n in part.inputs))

        candidates = (n for n in (*segment.constants, *self.placeholders) if n in values and tensors_of(n))
        like = values[next(candidates)]
        return sweep_of(runner, step, epilogue, position, like, questions)


def tokens_of(noted: tuple[int, int, tuple[tuple[sympy.Symbol, int], ...]]) -> int:
    """Tokens of a step, all sequences together."""
    tokens, _, others = noted
    return tokens * math.prod(v for _, v in others)


def _contiguous_at(executor: Executor) -> list[int]:
    """Positions of inputs whose strides no program knows: those that come in by rows, and slices."""
    facts = executor.facts
    by_rows = {n for s in facts.segments for n in s.rows} | facts.laid_out
    return [k for k, n in enumerate(executor.placeholders) if n in by_rows and tensors_of(n)]
