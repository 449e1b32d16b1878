"""What the programs of a compiled graph cost, at sizes that are numbers or symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
from torch.fx import Node

from ..passes.cost.autograd_live import UnchunkedStep
from ..passes.cost.program import ProgramCost, op_name, program_cost, tensor_bytes
from ..passes.cost.storages import storage_of
from ..passes.cost.work import Work
from ..passes.graph.facts import Facts, Mask, Reach, Segment, shape_of, sum_dtype, tensors_of
from ..passes.graph.subgraph import Subgraph
from ..passes.graph.symbols import compiled
from ..passes.s2_prove.footprints import mask_facts
from ..passes.s4_trace.carried_state import state_of_recurrence
from ..passes.s4_trace.program_inputs import Extent
from ..passes.s5_lower.programs import Trace
from ..passes.s6_schedule.own_rows import made_by_rows
from ..passes.step.instructions import Buffer, BufferKind, Chunks, Run
from ..passes.step.row_chunks import ChunkSize, chunk_size, rows_before
from ..passes.step.saving import ALL, Share, is_within
from ..runtime.executor import Executor
from ..runtime.segments.column_blocks import can_take_turns
from ..runtime.segments.segment_runner import SegmentRunner
from .held_bytes import LOW, PREFIX, ROWS, TOKENS, TOTAL, Sizes

# Two chunks of this many rows stand for "a chunk with a prefix" when programs are traced for an expression.
SAMPLE = 64


@dataclass(frozen=True)
class ChunkCost:
    """A program called on one chunk.

    Attributes:
        chunk, start, rows: which chunk, its first row, how many; with sizes that are symbols, the last one.
        peak: bytes that the call makes at once.
        saved: bytes that it saves; with sizes that are symbols, those of all chunks.
        work: what it computes and moves; with sizes that are symbols, the operations of all chunks alone.
    """

    chunk: int
    start: Any
    rows: Any
    peak: Any
    work: Work
    saved: Any


class ProgramCosts:
    """Costs of the programs that a step calls; each is traced and counted once.

    Args:
        facts: facts of the graph.
        executor: the compiled graph.
        known: what was counted for another executor of the graph is counted for this one as well.
    """

    def __init__(self, facts: Facts, executor: Executor, known: ProgramCosts | None = None) -> None:
        self.facts, self.executor = facts, executor
        self.plain = _unpadded(executor)
        self.first_use: dict[Node, int] = {}
        for segment in reversed(facts.segments):
            for node in (*segment.rows, *segment.constants, *segment.whole):
                self.first_use[node] = segment.index
        self.wide = executor.wide
        self.devices = 1  # over which the rows of each sequence are distributed
        self._programs: dict[Any, ProgramCost] = {} if known is None else known._programs
        self._counted: tuple | None = None
        self._calls_of: dict[Any, list[ChunkCost]] = {}
        self._numbers: dict[sympy.Expr, tuple[Callable[..., Any], list[sympy.Symbol]]] = (
            {} if known is None else known._numbers
        )

    def states_of(self, segment: Segment) -> list[Node]:
        """What later chunks of a segment read of the rows of earlier ones; none of an unchunked one."""
        runner = self.executor.runners[segment.index]
        return [] if runner is None else [s.node for s in runner.programs.states.values() if not s.by_chunk]

    def bytes_by_chunk(self, runner: SegmentRunner, buffer: Buffer, sizes: Sizes) -> Any:
        """Bytes of the states of a recurrence, one for each chunk and one more."""
        assert buffer.node is not None
        shape, dtype = state_of_recurrence(buffer.node, buffer.wide)
        rows = sizes.tokens - runner.segment.removed
        own = self.share(rows)
        chunks = own / sizes.chunk if sizes.symbolic else -(-own // sizes.chunk)
        return self.value(sympy.Mul(*shape) * dtype.itemsize, sizes) * (chunks + 1)

    def bytes_at_border(self, runner: SegmentRunner, buffer: Buffer, sizes: Sizes) -> Any:
        """Bytes that a device hands on of a state, or of its gradient: the device that hands on most.

        Of a recurrence one state; else the rows before its border, or those of them that are read behind it.
        """
        assert buffer.node is not None
        if buffer.by_chunk:
            shape, dtype = state_of_recurrence(buffer.node, buffer.wide)
            return self.value(sympy.Mul(*shape) * dtype.itemsize, sizes)
        size = self.bytes_of_buffer(buffer, sizes)
        rows, before = sizes.tokens - runner.segment.removed, runner.programs.states[buffer.node].before
        most = rows * (self.devices - 1)
        if isinstance(most, int):
            read = most // self.devices if before is None else min(most // self.devices, before)
            return size // rows * read
        return size / rows * (most / self.devices if before is None else before)

    def bytes_of_columns(
        self, runner: SegmentRunner, buffer: Buffer, sizes: Sizes, chunk: ChunkCost | None
    ) -> Any:
        """Bytes of what a chunk reads of a state gradient whose columns a window bounds.

        Args:
            chunk: the chunk, if the sizes are numbers; with symbols any of full length is meant.
        """
        assert buffer.node is not None and runner.segment.window is not None
        size = self.bytes_of_buffer(buffer, sizes)
        rows, behind = sizes.tokens - runner.segment.removed, int(runner.segment.window) - 1
        if sizes.symbolic or chunk is None:
            return size / rows * (sizes.chunk + behind)
        return size // rows * (chunk.rows + min(chunk.start, behind))

    def bytes_of_rows(self, runner: SegmentRunner, buffer: Buffer, sizes: Sizes, chunk: ChunkCost) -> Any:
        """Bytes of the rows of a chunk of a buffer that goes by rows."""
        size, rows = self.bytes_of_buffer(buffer, sizes), sizes.tokens - runner.segment.removed
        return size / rows * sizes.chunk if sizes.symbolic else size // rows * chunk.rows

    def per_chunk(self, saved: Any, sizes: Sizes) -> Any:
        """Bytes that one chunk saves, from those of a `ChunkCost`."""
        return saved * sizes.chunk / sizes.tokens if sizes.symbolic else saved

    def is_full(self, runner: SegmentRunner) -> bool:
        """True if every step runs the chunks of a segment with FULL reach."""
        always = not self.executor.asked.always_full.isdisjoint(runner.masks)
        return runner.segment.reach is Reach.FULL or (always and not runner.segment.chained)

    def reads_by_blocks(self, runner: SegmentRunner, sizes: Sizes) -> bool:
        """True if columns of other devices can come by blocks, see `SegmentRunner.may_read_by_blocks`."""
        if runner.programs.in_turn or runner.segment.removed or self.is_full(runner):
            return False
        if not sizes.symbolic and not can_take_turns(sizes.tokens, self.devices, sizes.chunk):
            return False
        extent = Extent(SAMPLE, SAMPLE, SAMPLE, 4 * SAMPLE, of_others=True)
        numbers = _numbers(self.facts, runner, extent)
        return runner.programs.read_by_blocks(self.plain_of(runner), extent, numbers)

    def bytes_of_block(self, runner: SegmentRunner, run: Run, sizes: Sizes) -> Any:
        """Bytes that are there while a block of columns is read, besides what the program holds.

        They are as many columns as a chunk has rows: gathered, joined and, in a backward, differentiated and
        summed (`runtime.segments.column_blocks`).
        """
        kinds = (BufferKind.STATE, BufferKind.STATE_GRADIENT) if run.adds else (BufferKind.STATE,)
        buffers = (b for kind in kinds for b in runner.programs.buffers(kind))
        twice = 2 * sum(self.bytes_of_buffer(b, sizes) for b in buffers)
        rows = sizes.tokens
        return twice / rows * sizes.chunk if sizes.symbolic else twice * sizes.chunk // rows

    def extents(
        self, runner: SegmentRunner, sizes: Sizes, share: Share = ALL, size: ChunkSize | None = None
    ) -> list[Any]:
        """The chunks of a share of a segment's rows; with symbolic sizes the last one alone.

        Args:
            size: of the loop; None: as where the segment runs by itself.
        """
        rows, full = (size or chunk_size(runner.segment)).of(sizes), self.is_full(runner)
        if not sizes.symbolic:
            found = runner.extents_of(sizes.tokens, rows, full)
            return [e for e in found if is_within(e.start, sizes.tokens, share)]
        total = sizes.tokens - runner.segment.removed
        start, before = total * share[1] - rows, rows_before(runner.segment, full)
        prefix = start if before is None else before
        return [Extent(rows, prefix, start - prefix, total, full)]

    def calls_of(self, runner: SegmentRunner, run: Run, sizes: Sizes, loop: Chunks) -> list[ChunkCost]:
        """What each chunk of a loop costs a program; identical segments are counted once."""
        share, size = loop.share, loop.size
        step = (sizes.tokens, sizes.chunk, sizes.loss_chunk, *sizes.others.items())
        if self._counted != step:
            self._counted, self._calls_of = step, {}
        plain = self.plain_of(runner)
        segment = runner.segment
        key = (
            id(runner.programs),
            run,
            plain,
            self.is_full(runner),
            segment.window,
            segment.removed,
            share,
            size,
        )
        if key not in self._calls_of:
            found, extents = [], self.extents(runner, sizes, share, size)
            first = 0 if share == ALL else len(self.extents(runner, sizes, (ALL[0], share[0]), size))
            for chunk, extent in enumerate(extents, first):
                cost = self.program(runner, run, extent, sizes)
                each = functools.partial(self._over_chunks, share=share) if sizes.symbolic else self.value
                held = self._own_columns(extent, sizes) if run.by_blocks else extent
                peak, work = self.value(cost.peak, sizes, held), self.work(cost, sizes, extent, each)
                work = work if sizes.symbolic else work + Work(programs=1)
                saved = each(cost.saved, sizes, extent)
                found.append(ChunkCost(chunk, extent.start, extent.rows, peak, work, saved))
            self._calls_of[key] = found
        return self._calls_of[key]

    def _own_columns(self, extent: Extent, sizes: Sizes) -> Extent:
        """The same rows with no more columns before them than a device has."""
        most = self.share(sizes.tokens) - sizes.chunk
        prefix = most if sizes.symbolic else max(0, min(extent.prefix, most))
        return replace(extent, prefix=prefix, low=extent.start - prefix)

    def work(
        self, cost: ProgramCost, sizes: Sizes, extent: Any = None, value: Callable[..., Any] | None = None
    ) -> Work:
        """The work of a program, as numbers; in symbols its operations alone.

        Args:
            cost, sizes: of the program, and of the step.
            extent: the chunk; None: the whole sequence.
            value: gives each part; None: `value`, of one call.
        """
        work, each = cost.work.operations if sizes.symbolic else cost.work, value or self.value
        return work.map(lambda part: each(sympy.sympify(part), sizes, extent))

    def _over_chunks(self, each: sympy.Expr, sizes: Sizes, last: Extent, share: Share = ALL) -> sympy.Expr:
        """Work or bytes of all chunks of a share of a segment's rows, from those of the last: chunks are of
        full length, and each but one with a window reads what comes before it."""
        chunk, chunks = sympy.Symbol("k", integer=True, nonnegative=True), last.total / last.rows
        grows = self.value(PREFIX, sizes, last).has(TOKENS)
        each = each.subs(PREFIX, chunk * last.rows) if grows else each
        ends = (chunk, share[0] * chunks, share[1] * chunks - 1)
        return sympy.expand(sympy.summation(self.value(each, sizes, last), ends))

    def plain_of(self, runner: SegmentRunner) -> frozenset[Mask]:
        """Masks of a segment, by the names of its programs, of which nothing but causality is left."""
        return frozenset(m for m, own in runner.model_masks.items() if own in self.plain)

    def program(self, runner: SegmentRunner, run: Run, extent: Extent, sizes: Sizes) -> ProgramCost:
        """Peak bytes and operations of a program on one chunk, as expressions in the sizes."""
        plain = self.plain_of(runner)
        numbers = extent
        if sizes.symbolic:
            before = rows_before(runner.segment, extent.full)
            prefix = SAMPLE if before is None else before
            numbers = Extent(SAMPLE, prefix, 0, SAMPLE + prefix, extent.full)
        own = numbers.own() if run.own else numbers
        key = (id(runner.programs), run.program, run.price, plain, own.pattern)
        if key not in self._programs:
            self._programs[key] = _cost_of(runner, self.facts, run, plain, own)
        return self._programs[key]

    def trace_of(self, runner: SegmentRunner, extent: Extent) -> Trace:
        """The joint program of a chunk, before it is lowered."""
        numbers = _numbers(self.facts, runner, extent)
        return runner.programs.traced("joint", self.plain_of(runner), extent, numbers)

    def names_of(self, runner: SegmentRunner, traced: Trace) -> dict[sympy.Symbol, sympy.Expr]:
        """What the size symbols of a trace are called here."""
        return _names(runner, traced.guards.names)

    def saved_by(self, runner: SegmentRunner, run: Run, sizes: Sizes) -> dict[str, int]:
        """What a forward saves of each chunk but the first, besides its inputs: bytes a row, by name.

        A value has the name of what it is made for, of the captured graph, and that of the op that makes it.
        """
        extent = self.extents(runner, sizes)[-1]
        assert run.price is not None
        traced = self.trace_of(runner, extent)
        names, found = _names(runner, traced.guards.names), dict[str, int]()
        for node in runner.programs.saved(traced, run.price):
            one = replace(extent, rows=1)
            name = f"{node.meta.get('origin', 'value')}: {op_name(node)}"
            size = self.value(sympy.sympify(tensor_bytes(node.meta["val"])).subs(names), sizes, one)
            found[name] = found.get(name, 0) + size
        return found

    def unchunked_cost(self, segment: Segment, backward: bool = True) -> ProgramCost:
        """Cost of a segment that runs unchunked: forward and VJP, or the forward alone."""
        key = ("unchunked", segment.signature, backward)
        if key not in self._programs:
            own = self.executor.parts.segments[segment.index]
            part = own if isinstance(own, Subgraph) else self.executor.parts.unchunked_form(segment)
            step = UnchunkedStep(self.facts, part, backward)
            names = {k: TOKENS if s == self.facts.sequence else s for k, s in step.symbols.items()}
            module, values = step.traced()
            live = step.live()
            self._programs[key] = program_cost(module, names, values, live, recorded=step.recorded)
        return self._programs[key]

    def joint_cost(self, segment: Segment, backward: bool = True) -> ProgramCost:
        """Cost of a segment's forward and VJP, or of its forward, over the whole sequence at once: eager."""
        runner = self.executor.runners[segment.index]
        if runner is None:
            return self.unchunked_cost(segment, backward)
        key = (id(runner.programs), "at once", backward)
        if key not in self._programs:
            programs = runner.programs
            extent = Extent(SAMPLE, 0, 0, SAMPLE, segment.reach.name == "FULL")
            plain = self.plain_of(runner)
            kind = "joint" if backward else "forward"
            traced = programs.traced(kind, plain, extent, _numbers(self.facts, runner, extent))
            names = _names(runner, traced.guards.names)
            at_once = {ROWS: TOKENS, TOTAL: TOKENS, PREFIX: sympy.S.Zero, LOW: sympy.S.Zero}
            names = {k: at_once.get(name, name) for k, name in names.items()}
            self._programs[key] = program_cost(traced.module, names, traced.values if backward else None)
        return self._programs[key]

    @cached_property
    def of_caller(self) -> frozenset[int]:
        """Storages that inputs of the graph lie in: what shares one is no memory of the step."""
        inputs = (n for n in self.facts.nodes if n.op in ("placeholder", "get_attr") and tensors_of(n))
        return frozenset(storage_of(tensors_of(n)[0]) for n in inputs)

    @cached_property
    def by_rows(self) -> frozenset[Node]:
        """Values of which each device has its own rows, where a sequence is on several."""
        return made_by_rows(self.facts)

    def share(self, size: Any) -> Any:
        """What one device has of rows that take so many bytes, or of the work on them."""
        if self.devices == 1:
            return size
        return -(-size // self.devices) if isinstance(size, int) else size / self.devices

    def share_of_work(self, work: Work) -> Work:
        """What one device does of some work; of a program, which is called once, a part as well."""
        shared = work.map(self.share)
        return shared if self.devices == 1 else replace(shared, programs=work.programs / self.devices)

    # ---- sizes

    def held_of(self, node: Node, sizes: Sizes) -> Any:
        """Bytes that a device holds of a value, or of its gradient; as a number or an expression."""
        size = self.bytes_of(node, sizes)
        return self.share(size) if node in self.by_rows else size

    def bytes_of(self, node: Node, sizes: Sizes) -> Any:
        """Bytes of the (first) tensor of a node, as a number or an expression, as the sizes are."""
        value = tensors_of(node)[0]
        return self.value(sympy.Mul(*shape_of(node)) * value.element_size(), sizes)

    def bytes_of_buffer(self, buffer: Buffer, sizes: Sizes) -> Any:
        """Bytes of a buffer with all its rows; of a sum over chunks, in the dtype in which it is summed."""
        assert buffer.node is not None
        wide = buffer.wide and self.wide
        return (self.sum_bytes if wide else self.bytes_of)(buffer.node, sizes)

    def sum_bytes(self, node: Node, sizes: Sizes) -> Any:
        """Bytes of the sum of a value's gradients over chunks."""
        dtype = tensors_of(node)[0].dtype
        wider = sum_dtype(dtype).itemsize // dtype.itemsize if self.wide else 1
        return self.bytes_of(node, sizes) * wider

    def value(self, size: sympy.Expr, sizes: Sizes, extent: Any = None) -> Any:
        """A size of the graph or of a program, as a number or in the symbols of the step."""
        env = {self.facts.sequence: sizes.tokens, TOKENS: sizes.tokens, **sizes.others}
        if extent is not None:
            env |= {ROWS: extent.rows, PREFIX: extent.prefix, LOW: extent.low, TOTAL: extent.total}
        if sizes.symbolic:
            return size.subs(env) if not size.is_Integer else size
        found = self._numbers.get(size)
        if found is None:
            symbols = sorted(size.free_symbols, key=str)
            found = self._numbers[size] = compiled(symbols, size), symbols
        function, symbols = found
        return int(function(*(env[s] for s in symbols)))


def _cost_of(
    runner: SegmentRunner, facts: Facts, run: Run, plain: frozenset[Mask], extent: Extent
) -> ProgramCost:
    numbers = _numbers(facts, runner, extent)
    lowered = runner.programs.get(run.program, plain, extent, numbers, run.price)
    names, saved = _names(runner, lowered.sizes), 0
    if run.program == "forward" and run.price is not None:
        saved = len(lowered.module.graph.output_node().args[0]) - len(runner.segment.outputs)
    return program_cost(lowered.module, names, throughout=lowered.product, saved=saved)


def _numbers(facts: Facts, runner: SegmentRunner, extent: Extent) -> list[Any]:
    """The numbers at the front of a program's inputs."""
    return [*extent.sizes, 0, *(facts.values.get(s, 2) for s in runner.programs.symbols)]


def _names(runner: SegmentRunner, sizes: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, sympy.Expr]:
    """What the size symbols of a program are called here."""
    known = {"rows": ROWS, "prefix": PREFIX, "low": LOW, "total": TOTAL}
    known |= {str(s): s for s in runner.programs.symbols}
    return {symbol: known[name] for symbol, name in sizes.items() if name in known}


def _unpadded(executor: Executor) -> frozenset[Mask]:
    """Masks of which nothing but causality is left where no token is padding."""
    found = ((m, mask_facts(executor.facts, m)) for m in executor.parts.masks)
    return frozenset(m for m, known in found if known.plain_without_data and not known.has_bias)
