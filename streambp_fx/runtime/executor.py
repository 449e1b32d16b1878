"""Runs a compiled graph: whole values, segments in order, epilogue, what is written back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from ..options import Options
from ..passes.batch import batch_size
from ..passes.extract import Subgraph
from ..passes.ir import Facts, Segment, evaluate_size, shape_of, tensors_of
from ..passes.policy import Policy, groups
from ..passes.purity import is_random
from ..passes.segment import samples
from ..passes.shown import is_shown
from .blocks import Step
from .common import OwnedBuffers, as_it_is
from .function import StreamedSegment
from .head import OneSweepHead, Sweep, sweep_of
from .kinds import Draws, Prepared, StepKind, step_kind
from .lazy import LazyOutput
from .offload import Store, store_for
from .padding import Padding
from .parts import (
    Programs,
    attribute,
    lazy_parts,
    one_sweep,
    reads,
    runners_of,
    whole_form,
    whole_inputs,
    whole_targets,
)
from .questions import MaskQuestions, Questions, masks_to_test
from .sizes import SizesDiffer, read_sizes, size_places, tests_of_sizes
from .streamed import SegmentRunner
from .whole import WholeSegment
from .written import WrittenInputs

aten = torch.ops.aten
# Later than any segment.
NEVER = 2**31


class Executor:
    """The compiled form of one captured graph; called with the graph's inputs.

    Args:
        facts: facts of the graph after the segment pass.
        options: `chunk` rows of a chunk, `loss_chunk` rows where a segment carries no state (the loss head),
            `logits` for the outputs in `facts.lazy`.
        programs: programs of another executor of the same graph, to be used again where they are the same.
    """

    def __init__(self, facts: Facts, options: Options, programs: Programs | None = None) -> None:
        self.facts, self.options, self.samples = facts, options, samples(facts)
        self.batch = batch_size(facts)
        self.programs: Programs = {} if programs is None else programs
        self.placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        self.constants = {n: attribute(facts, n) for n in facts.nodes if n.op == "get_attr"}
        self.results, self.written = facts.results, WrittenInputs(facts)
        self.sizes_at = size_places(facts)
        self.guards = tests_of_sizes(facts)
        self.contiguous_at = _contiguous_at(self)
        # Of the largest step so far: tokens of a sequence, rows of a chunk, other sizes.
        self.largest: tuple[int, int, tuple[tuple[sympy.Symbol, int], ...]] | None = None
        streamed = {n for s in facts.segments for n in s.outputs}
        self.runners = runners_of(facts, options, self.programs)
        self.whole_forms: dict[int, Subgraph] = {}
        self.masks = masks_to_test(facts)
        self.asked = MaskQuestions(facts, self.masks)
        wanted = [n for n in self.results if isinstance(n, Node) and n not in streamed and tensors_of(n)]
        known = streamed | whole_inputs(facts)
        self.tail = Subgraph(facts, list(dict.fromkeys(wanted)), known)
        self.lazy = lazy_parts(facts, known) if options.logits == "lazy" else {}
        read = {n for part in (self.tail, *self.lazy.values()) for n in part.inputs}
        self.whole = Subgraph(facts, whole_targets(facts, read, self.masks), set())
        self.policy, self.wide = options.stored, options.accumulate == "float32"
        self.groups = groups(facts, self.policy)
        self.last_read = _last_reads(self)
        self.random = any(is_random(n) for n in facts.nodes)
        self.one_sweep = one_sweep(facts, self.runners, self.tail)
        self.overwritten = _read_last_by_head(self)
        self.padding = Padding(self)

    @property
    def sweeps(self) -> int:
        """Over the loss head in a training step: 1 or 2, or 0 if the graph has no loss."""
        if self.one_sweep is not None:
            return 1
        return 2 if any(n in self.facts.needs_grad for n in self.tail.outputs) else 0

    def storing(self, policy: Policy) -> Executor:
        """The executor with this memory policy: this one."""
        assert policy == self.policy
        return self

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
        draws = Draws(inputs) if self.random and first is not None else None
        with torch._C._DisableAutocast():  # its casts are ops of the graph
            prepared = self._prepared(self._laid_out(self.written.copied(inputs)), rows, loss_rows)
        if first is not None and prepared.step.training:
            try:
                first(step_kind(self, prepared.step, prepared.sweep))
            except BaseException:
                if draws is not None:
                    draws.restore()
                raise
        with torch._C._DisableAutocast():
            results = self._run_step(prepared)
        return self.written.write(inputs, results)

    def kind(self, inputs: Sequence[Any], rows: int, loss_rows: int) -> StepKind:
        """The kind of a training step with these chunks; it is not run."""
        with torch._C._DisableAutocast():
            prepared = self._prepared(self._laid_out(self.written.copied(inputs)), rows, loss_rows)
        return step_kind(self, prepared.step, prepared.sweep)

    def _laid_out(self, inputs: tuple) -> tuple:
        """Inputs in the order in memory that the programs take them to have."""
        given = list(inputs)
        for position in self.contiguous_at:
            given[position] = given[position].contiguous()
        return tuple(given)

    def _prepared(self, inputs: tuple, rows: int | None, loss_rows: int | None) -> Prepared:
        """Ask the data what decides how the step runs: in time linear in the sequence."""
        values, sizes = self.begin(inputs)
        step, questions = self._step(sizes, rows, loss_rows), Questions()
        self._note(step)
        fetch = functools.partial(self.value, values=values, sizes=sizes)
        self.asked.ask(questions, fetch)
        sweep = self._sweep(values, sizes, step, questions)
        if sweep is not None and sweep.unread is not None and self.padding.runs_to_the_end is None:
            self.asked.ask_where_it_counts(questions, fetch, sweep.unread)
        step.plain, step.full = self.asked.plain(questions), self.asked.full(questions)
        if sweep is not None:
            sweep.learn(questions)
            self.padding.leave_out(step, sweep, self.asked.plain_where_it_counts(questions))
        return Prepared(inputs, values, sizes, step, sweep)

    def _run_step(self, prepared: Prepared) -> list[Any]:
        inputs, values, sizes = prepared.inputs, prepared.values, prepared.sizes
        step, sweep = prepared.step, prepared.sweep
        store = self._store(values)
        for group in self.groups:
            if sweep is not None and group[-1] is self.facts.segments[-1]:
                if store is not None:
                    store.finish()
                self._loss_in_one_sweep(values, step, sweep)
                break
            with _kept_in(store):
                self._run_group(group, values, sizes, step)
            self.forget(group[-1], values)
        else:
            self._run(self.tail, values, sizes)
        results = [self.value(n, values, sizes) if isinstance(n, Node) else n for n in self.results]
        for position, part in self.lazy.items():
            results[position] = self._lazily(part, values, sizes, inputs, step)
        return results

    # ---- parts of a step

    def _note(self, step: Step) -> None:
        if not step.training:
            return
        others = tuple((s, v) for s, v in step.sizes.items() if s != self.facts.sequence)
        noted = (step.total, step.chunk, others)
        if self.largest is None or tokens_of(noted) > tokens_of(self.largest):
            self.largest = noted

    def sequences(self, sizes: Mapping[sympy.Symbol, int]) -> int:
        """How many sequences there are, from the values of the size symbols."""
        return int(self.samples.subs(sizes))

    def sizes(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of each size symbol."""
        return read_sizes(self.sizes_at, inputs)

    def _run(self, part: Subgraph, values: dict[Any, Any], sizes: dict[sympy.Symbol, int]) -> None:
        """Run a subgraph in ordinary PyTorch and keep its outputs."""
        found = part.module(*(self.value(n, values, sizes) for n in part.inputs))
        values.update(zip(part.outputs, found, strict=True))

    def _lazily(
        self,
        part: Subgraph,
        values: dict[Any, Any],
        sizes: dict[sympy.Symbol, int],
        inputs: tuple,
        step: Step,
    ) -> Tensor:
        node = part.outputs[0]
        shape = torch.Size(int(s.subs(sizes)) for s in shape_of(node))
        like = tensors_of(node)[0]
        given = [self.value(n, values, sizes) for n in part.inputs]
        anew = self.padding.completion(part, inputs, step)
        made = LazyOutput.apply(part, shape, like.dtype, like.device, anew, *given)
        made.of_the_loss = is_shown(self.facts, node)
        return made

    def value(self, node: Node, values: dict[Any, Any], sizes: dict[sympy.Symbol, int]) -> Any:
        if node in values:
            return values[node]
        return evaluate_size(node, lambda expr: int(expr.subs(sizes)))

    def begin(self, inputs: Sequence[Any]) -> tuple[dict[Any, Any], dict[sympy.Symbol, int]]:
        """The values that a step begins with, whole values among them, and the sizes."""
        values: dict[Any, Any] = dict(zip(self.placeholders, inputs, strict=True))
        values.update(self.constants)
        sizes = self.sizes(inputs)
        with torch.no_grad():
            self._run(self.whole, values, sizes)
        return values, sizes

    def forget(self, segment: Segment, values: dict[Any, Any]) -> None:
        """Drop what is read last by this segment: what is kept of it is autograd's, or lies elsewhere."""
        for node in [n for n in values if self.last_read.get(n) == segment.index]:
            del values[node]

    def _step(self, sizes: dict[sympy.Symbol, int], rows: int | None, loss_rows: int | None) -> Step:
        """A step of which nothing is known but its sizes."""
        seed = int(torch.randint(0, 2**40, ())) if self.random else 0
        total = sizes[self.facts.sequence]  # type: ignore[index]
        training = torch.is_grad_enabled()
        chunks = rows or self.options.rows, loss_rows or self.options.loss_rows(self.sequences(sizes))
        return Step(sizes, total, seed, OwnedBuffers(), *chunks, training, batch=self.batch)

    def _store(self, values: dict[Any, Any]) -> Store | None:
        """Where what is saved lies until the backward, if not where it is."""
        if self.policy.offload == "none" or not torch.is_grad_enabled():
            return None
        resident = [v for v in values.values() if isinstance(v, Tensor)]
        return store_for(self.policy.offload, resident[0].device, resident)

    def _run_group(
        self, group: list[Segment], values: dict[Any, Any], sizes: dict[sympy.Symbol, int], step: Step
    ) -> None:
        """One segment; or several, of which only the inputs of the first are kept."""
        if len(group) == 1 or not step.training:
            for segment in group:
                self.run_segment(segment, values, sizes, step)
            return
        inputs, outputs = self._inputs_of(group, values), self.outputs_of(group)
        fixed = {n: v for n, v in inputs.items() if not isinstance(v, Tensor)}
        tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
        nodes, runs = list(tensors), itertools.count()  # the function must not hold what segments made
        held = {n: as_it_is(v).requires_grad_(v.requires_grad) for n, v in tensors.items() if v.is_leaf}

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            again = next(runs) > 0
            local = {**fixed, **dict(zip(nodes, given, strict=True)), **(held if again else {})}
            for segment in group:
                # nobody reads the last outputs again, and what they were made of is kept
                unread = again and segment is group[-1] and self.policy.save == "inputs"
                self.run_segment(segment, local, sizes, step, unread)
            return tuple(local[n] for n in outputs)

        found = checkpoint(run, *tensors.values(), use_reentrant=False, preserve_rng_state=self.random)
        values.update(zip(outputs, found, strict=True))

    def _inputs_of(self, group: list[Segment], values: dict[Any, Any]) -> dict[Node, Any]:
        made = {n for s in group for n in s.outputs}
        read = [n for s in group for n in reads(s, self.runners[s.index])]
        return {n: values[n] for n in read if n not in made and n in values}

    def outputs_of(self, group: list[Segment]) -> list[Node]:
        """What is read outside a group."""
        made = [n for s in group for n in s.outputs]
        return [n for n in made if self.last_read.get(n, NEVER) > group[-1].index]

    def run_segment(
        self,
        segment: Segment,
        values: dict[Any, Any],
        sizes: dict[sympy.Symbol, int],
        step: Step,
        unread: bool = False,
    ) -> None:
        runner = self.runners[segment.index]
        if not isinstance(runner, Subgraph) and segment.chained and runner.is_full(step):
            runner = self.whole_form(segment)  # NOTE [chained states]
        if isinstance(runner, Subgraph):
            given = [self.value(n, values, sizes) for n in runner.inputs]
            outputs = WholeSegment.apply(runner, *given)
        else:
            whole = [values[n] for n in segment.whole]
            outputs = StreamedSegment.apply(runner, step, whole, unread, *_inputs(segment, values))
        values.update(zip(segment.outputs, outputs, strict=True))

    def whole_form(self, segment: Segment) -> Subgraph:
        if segment.index not in self.whole_forms:
            self.whole_forms[segment.index] = whole_form(self.facts, segment)
        return self.whole_forms[segment.index]

    def _sweep(
        self, values: dict[Any, Any], sizes: dict[sympy.Symbol, int], step: Step, questions: Questions
    ) -> Sweep | None:
        """The sweep over the loss head, if there is one only. It asks what the step need not run."""
        if self.one_sweep is None or not step.training:
            return None
        segment, runner = self.facts.segments[-1], self.runners[-1]
        whole = {k: v for k, v in values.items() if k in self.tail.inputs}

        def epilogue(rows: Tensor) -> Any:
            local = {**whole, segment.outputs[0]: rows}
            return self.tail.module(*(self.value(n, local, sizes) for n in self.tail.inputs))

        like = next(values[n] for n in (*segment.constants, *self.placeholders) if tensors_of(n))
        return sweep_of(runner, step, epilogue, self.one_sweep, self.overwritten, like, questions)

    def _loss_in_one_sweep(self, values: dict[Any, Any], step: Step, sweep: Sweep) -> None:
        segment, runner = self.facts.segments[-1], self.runners[-1]
        whole = [values[n] for n in segment.whole]
        found = OneSweepHead.apply(runner, step, whole, sweep, *_inputs(segment, values))
        values.update(zip(self.tail.outputs, found, strict=True))


def _inputs(segment: Segment, values: dict[Any, Any]) -> list[Tensor]:
    """Streamed inputs, in the order in memory that programs take them to have, and constants.

    What comes out of a segment that runs whole may be a view.
    """
    return [*(values[n].contiguous() for n in segment.rows), *(values[n] for n in segment.constants)]


def tokens_of(noted: tuple[int, int, tuple[tuple[sympy.Symbol, int], ...]]) -> int:
    """Tokens of a step, all sequences together."""
    tokens, _, others = noted
    return tokens * math.prod(v for _, v in others)


def _contiguous_at(executor: Executor) -> list[int]:
    """Positions of inputs whose strides no program knows: those that come in by rows, and slices."""
    facts = executor.facts
    by_rows = {n for s in facts.segments for n in s.rows} | facts.laid_out
    return [k for k, n in enumerate(executor.placeholders) if n in by_rows and tensors_of(n)]


def _last_reads(executor: Executor) -> dict[Node, int]:
    """The last segment that reads what another has made; later than all: the epilogue and the caller."""
    made = {n for s in executor.facts.segments for n in s.outputs}
    parts = (executor.tail, *executor.lazy.values())
    found = dict.fromkeys((n for n in executor.results if isinstance(n, Node)), NEVER)
    found.update(dict.fromkeys((n for p in parts for n in p.inputs), NEVER))
    for segment in reversed(executor.facts.segments):
        for node in reads(segment, executor.runners[segment.index]):
            found.setdefault(node, segment.index)
    return {n: index for n, index in found.items() if n in made}


def _read_last_by_head(executor: Executor) -> frozenset[Node]:
    """Streamed inputs of a loss head with one sweep that nobody else keeps or reads later.

    Only of segments that are run by chunks, which write into memory of their own: what another returns may
    be a view of what it keeps.
    """
    if executor.one_sweep is None or executor.facts.segments[-1].removed:
        return frozenset()
    head, earlier = executor.facts.segments[-1], executor.facts.segments[:-1]
    kept = {n for s in earlier for n in s.rows}
    last = (n for n in executor.runners[-1].diff_rows if executor.last_read.get(n) == head.index)
    own = [s for s, r in zip(earlier, executor.runners, strict=False) if isinstance(r, SegmentRunner)]
    fresh = {n for s in own if not s.chained for n in s.outputs}
    return frozenset(n for n in last if n not in kept and n in fresh)


def _kept_in(store: Store | None) -> Any:
    """What is saved meanwhile lies in a store."""
    if store is None:
        return contextlib.nullcontext()
    store.begin()
    return torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack)
