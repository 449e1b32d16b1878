"""Where a streamed step that is wrong goes wrong first: segment by segment, then op by op."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..passes.graph.facts import Kind, PassError, Segment, tensors_of
from ..passes.graph.sources import path, source_line
from ..passes.graph.symbols import evaluate_size
from ..passes.s3_cut.alive_bytes import row_axis
from ..passes.s4_trace.carried_state import state_of_recurrence
from ..passes.s4_trace.chunk_program import ChunkProgram
from ..passes.s4_trace.evaluation import evaluated
from ..passes.s4_trace.vjp import Columns
from ..passes.s6_schedule.build import overwritten_cotangent
from ..passes.step.way import Way
from ..runtime.executor import Executor
from ..runtime.segments.owned_buffers import attribute
from ..runtime.segments.questions_to_data import Questions
from ..runtime.segments.segment_function import Procedures, StreamedSegment
from ..runtime.segments.segment_runner import SegmentRunner
from ..runtime.segments.step_blocks import StepData
from .short_inputs import ShortSizes
from .short_steps import differences, run

# Relative differences within one segment that are none of rounding.
APART = "every segment alone is right"
CLEAR = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Blame:
    """What is wrong, and where: index of the segment, the op, the model's source line, as far as known."""

    reason: str
    segment: int | None = None
    op: str | None = None
    line: str | None = None


def blame(
    module: GraphModule, executor: Executor, given: Sequence[Any], sizes: ShortSizes, fixed: Collection[int]
) -> Blame | None:
    """Run parts of a step whole and streamed, on the same inputs; the first that differs, or None.

    Args:
        module: the Dynamo graph.
        executor: of the same graph.
        given: short inputs.
        sizes: theirs.
        fixed: positions of the parameters.
    """
    captured = _captured_differs(module, executor, given, fixed)
    if captured is not None:
        return captured
    trial = _Trial(executor, given, sizes)
    for segment, runner in zip(executor.facts.segments, executor.runners, strict=True):
        if runner is not None:
            found = trial.of(segment, runner)
            if found is not None:
                return found
    clear = _clear(v for n in executor.facts.nodes for v in tensors_of(n))
    return Blame(
        f"{APART} to {clear:.0e}: what joins them is not (loss, epilogue, buffers), or one is wrong by less"
    )


def _captured_differs(
    module: GraphModule, executor: Executor, given: Sequence[Any], fixed: Collection[int]
) -> Blame | None:
    """If the graph that the passes work on is not what Dynamo captured."""
    facts = executor.facts
    lazy = set(facts.lazy)

    def passes(*inputs: Any) -> Any:
        with torch._C._DisableAutocast():
            results, places = list(facts.module(*executor.written.copied(inputs))), executor.written.positions
        results = results[: len(results) - len(facts.asked)]
        with torch.no_grad():
            for position, value in zip(places, results[len(results) - len(places) :], strict=True):
                inputs[position].copy_(value)
        return results[: len(results) - len(places)]

    expected, found = run(module, given, fixed, skipped=lazy), run(passes, given, fixed, skipped=lazy)
    clear = max(_clear(given), _clear(v for n in facts.nodes for v in tensors_of(n)))  # autocast casts within
    for d in differences(expected, found):
        if d.gap > clear * max(d.scale, expected.total * 1e-3):
            return Blame(
                f"the captured graph, run whole, differs from the model's ({d.what}: {d.words or d.gap})"
            )
    return None


def _clear(values: Iterable[Any]) -> float:
    dtypes = {v.dtype for v in values if isinstance(v, Tensor)}
    return max((CLEAR[d] for d in dtypes if d in CLEAR), default=CLEAR[torch.float32])


class _Trial:
    """Segments on the values that the captured graph has, run whole."""

    def __init__(self, executor: Executor, given: Sequence[Any], sizes: ShortSizes) -> None:
        self.executor, self.facts = executor, executor.facts
        self.values, self.sizes = executor.begin(executor.written.copied(given))
        self.step = self._step(sizes)
        with torch.no_grad(), torch._C._DisableAutocast():
            for node in self.facts.nodes:
                self._evaluate(node)

    def _step(self, sizes: ShortSizes) -> StepData:
        step = self.executor._step(self.sizes, sizes.chunk, sizes.loss_chunk)
        questions = Questions()
        self.executor.asked.ask(questions, lambda n: self.executor.value(n, self.values, self.sizes))
        step.plain, step.full = self.executor.asked.plain(questions), self.executor.asked.full(questions)
        return step

    def _evaluate(self, node: Node) -> None:
        if node.op == "output" or node in self.values:
            return
        if self.facts.kinds.get(node) is Kind.SIZE:
            self.values[node] = evaluate_size(node, lambda e: int(e.subs(self.sizes)))
        elif node.op == "get_attr":
            self.values[node] = attribute(self.facts, node)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def of(self, segment: Segment, runner: SegmentRunner) -> Blame | None:
        """What differs in a segment that runs in chunks."""
        try:
            words, node = self._differs(segment, runner)
        except Exception as error:
            words, node = f"it fails: {type(error).__name__}: {error}", getattr(error, "node", None)
        if not words:
            return None
        node = self._first_op(segment, runner) or node
        where = (str(node.target), source_line(node)) if node is not None else (None, None)
        return Blame(words, segment.index, *where)

    def _procedures(self, segment: Segment, runner: SegmentRunner) -> Procedures:
        over = overwritten_cotangent(self.facts, segment, runner.programs)
        way = Way(runner.is_full(self.step), overwrites=over)
        backward = runner.programs.procedure("backward", way) if runner.needs_grad else None
        return runner.programs.procedure("forward", way), backward

    def _differs(self, segment: Segment, runner: SegmentRunner) -> tuple[str, Node | None]:
        """In words, with the node whose value or gradient it is; ("", None) if all is well."""
        order = (*segment.rows, *segment.constants)
        part = self.executor.parts.unchunked_form(segment)
        whole = [self.values[n] for n in segment.whole]
        results = []
        for streamed in (False, True):
            leaves = {n: self._own(n).requires_grad_(n in self.facts.needs_grad) for n in order}
            with torch.enable_grad(), torch._C._DisableAutocast():
                if streamed:
                    outputs = StreamedSegment.apply(
                        runner, self.step, whole, self._procedures(segment, runner), *leaves.values()
                    )
                else:
                    outputs = part.module(
                        *(leaves.get(n, self.executor.value(n, self.values, self.sizes)) for n in part.inputs)
                    )
                results.append((outputs, self._gradients(segment, outputs, leaves)))
        (expected, wanted), (found, gradients) = results
        for node, a, b in zip(segment.outputs, expected, found, strict=True):
            if self._far(a, b):
                return f"its output differs by {_share(a, b):.1e} of its norm", node
        for leaf in wanted:
            a, b = wanted[leaf], gradients[leaf]
            if a is None and b is None:
                continue
            if a is None or b is None or self._far(a, b):
                reader = next((n for n in segment.nodes if leaf in n.all_input_nodes), leaf)
                how = "" if a is None or b is None else f" by {_share(a, b):.1e} of its norm"
                return f"the gradient of {self._name(leaf)} differs{how}", reader
        return "", None

    def _own(self, node: Node) -> Tensor:
        """A copy of a value that lies in memory as a segment gets it: what a segment has made in order."""
        kept = torch.preserve_format if node.op == "placeholder" else torch.contiguous_format
        value: Tensor = self.values[node].detach().clone(memory_format=kept)
        return value

    def _gradients(
        self, segment: Segment, outputs: Sequence[Tensor], leaves: dict[Node, Tensor]
    ) -> dict[Node, Tensor | None]:
        wanted = {n: v for n, v in leaves.items() if v.requires_grad}
        roots = [(n, o) for n, o in zip(segment.outputs, outputs, strict=True) if o.requires_grad]
        if not wanted or not roots:
            return {}
        generator = torch.Generator().manual_seed(segment.index)
        cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float32, device="cpu").to(o.device, o.dtype)
            for _, o in roots
        ]
        found = torch.autograd.grad(
            [o for _, o in roots], list(wanted.values()), cotangents, allow_unused=True
        )
        return dict(zip(wanted, found, strict=True))

    def _name(self, node: Node) -> str:
        return path(node) if node.op == "placeholder" else node.name

    def _far(self, a: Tensor, b: Tensor) -> bool:
        return not _share(a, b) <= _clear([a])

    def _first_op(self, segment: Segment, runner: SegmentRunner) -> Node | None:
        """The first op whose rows, made chunk by chunk, are not those that it makes whole."""
        targets = [n for n in segment.nodes if self._by_rows(n)]
        program = ChunkProgram(self.facts, segment, targets, self.step.plain & set(runner.masks))
        wrong: set[Node] = set()
        with torch.no_grad(), torch._C._DisableAutocast():
            carried = {n: self._no_state(n) for n, s in program.states.items() if s.by_chunk}
            for extent in runner.extents(self.step):
                ranges = extent.ranges(partial(getattr, extent))
                rows = {n: runner.rows_of(n, self.values[n], extent, self.step) for n in segment.rows}
                others = {n: self.values[n] for n in (*segment.constants, *segment.whole)}
                total = {self.facts.sequence: extent.total + segment.removed}
                bindings = {**self.sizes, **total, **others, **rows}
                buffers = {
                    n: self.values[n].narrow(s.dim, extent.low, ranges.columns).clone()
                    for n, s in program.states.items()
                    if not s.by_chunk
                }
                buffers |= {n: carried[n] for n, s in program.states.items() if s.by_chunk}
                try:
                    values = evaluated(program, bindings, ranges, Columns(buffers, ranges, write=False), 0)
                except PassError as error:
                    return error.node
                for state in carried.values():
                    state[0] = state[1]
                for node, value in zip(targets, values, strict=True):
                    own = runner.rows_of(node, self.values[node], extent, self.step)
                    if isinstance(value, Tensor) and self._far(own, value):
                        wrong.add(node)
        return next((n for n in segment.nodes if n in wrong), None)

    def _no_state(self, node: Node) -> Tensor:
        """The state of a recurrence before a chunk and after it, of zeros."""
        sizes, dtype = state_of_recurrence(node)
        shape = [2, *(int(s.subs(self.sizes)) for s in sizes)]
        return torch.zeros(shape, dtype=dtype, device=self.values[node].device)

    def _by_rows(self, node: Node) -> bool:
        return isinstance(self.values.get(node), Tensor) and row_axis(self.facts, node) is not None


def _share(a: Tensor, b: Tensor) -> float:
    """Norm of the difference, relative."""
    if a.shape != b.shape:
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    gap, norm = float(torch.linalg.vector_norm(a - b)), float(torch.linalg.vector_norm(a))
    return gap / norm if norm else gap
