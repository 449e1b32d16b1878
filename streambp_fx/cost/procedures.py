"""What the procedures of segments hold and run, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..passes.graph.facts import Segment
from ..passes.s6_schedule.collectives import Collective, CollectiveKind
from ..passes.s6_schedule.program import Call
from ..passes.s6_schedule.program.one_loop import HandOn, OneLoop
from ..passes.s6_schedule.program.values import Value, ValueKind
from ..passes.step.instructions import (
    BY_ROWS,
    DEVICE,
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Hand,
    Keep,
    Normalize,
    Overwrite,
    Receive,
    ReduceScatter,
    Roll,
    Round,
    Run,
    Scale,
    Send,
    WriteRows,
    ZeroRows,
)
from ..runtime.segments.column_blocks import sent_by_blocks
from ..runtime.segments.segment_runner import SegmentRunner
from .held_bytes import (
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
from .programs import ChunkCost, ProgramCosts

CAUSE_OF = {
    BufferKind.STATE: STATE,
    BufferKind.STATE_GRADIENT: STATE_GRADIENTS,
    BufferKind.SUM: PARAMETERS,
    BufferKind.GRADIENT: HIDDEN,
}


class ProcedureWalk:
    """Follows procedures, and notes what is held.

    Args:
        cost: costs of the programs.
        sizes: as numbers or symbols.

    Attributes:
        ledger: what is held, by value of the step, or by segment and buffer within a procedure.
        out, back: bytes of rows that lie elsewhere: that have left the device so far, and come back.
    """

    def __init__(self, cost: ProgramCosts, sizes: Sizes) -> None:
        self.cost, self.facts, self.sizes = cost, cost.facts, sizes
        self.ledger = Ledger()
        self.out: Any = 0
        self.back: Any = 0

    def walk(self, call: Call, phase: str) -> Iterator[Moment]:
        """The moments of a procedure."""
        procedure = _Bound(call, self.runner(call), phase)
        for instruction in call.procedure.body:
            yield from COUNT[type(instruction)](self, instruction, procedure)

    def walk_one_loop(self, loop: OneLoop, phase: str) -> Iterator[Moment]:
        """The moments of procedures whose loops run as one."""
        bound = {id(call): _Bound(call, self.runner(call), phase) for call in loop.calls}
        for own in loop.before:
            yield from COUNT[type(own.instruction)](self, own.instruction, bound[id(own.call)])
        costs = {key: self._costs(own) for key, own in bound.items()}
        if self.sizes.symbolic:  # a chunk stands for all: there was one before it
            for own in loop.body:
                if isinstance(own.instruction, Roll):
                    self._roll(own.instruction, bound[id(own.call)], None)
        chunks = range(len(costs[id(loop.calls[0])]))
        for k in reversed(chunks) if loop.reverse else chunks:
            for own in loop.body:
                within, chunk = bound[id(own.call)], costs[id(own.call)][k]
                yield from COUNT_OF_CHUNK[type(own.instruction)](self, own.instruction, within, chunk)
        for own in loop.after:
            yield from COUNT[type(own.instruction)](self, own.instruction, bound[id(own.call)])

    def _costs(self, within: _Bound) -> list[ChunkCost]:
        ((loop, run),) = within.call.procedure.runs()
        return self.cost.calls_of(within.runner, run, self.sizes, loop)

    # ---- a chunk of several segments: its rows, and what is kept of it, are there until somebody frees them

    def _roll_to(self, instruction: Roll, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        self._roll(instruction, within, chunk)
        yield from ()

    def _roll(self, instruction: Roll, within: _Bound, chunk: ChunkCost | None) -> None:
        """A state gradient has from now on the columns of a chunk; None: of any, if sizes are symbols."""
        size = self.cost.bytes_of_columns(within.runner, instruction.buffer, self.sizes, chunk)
        self.ledger.hold(within.key(instruction.buffer), STATE_GRADIENTS, size)

    def _run_chunk(self, instruction: Run, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        held = self.ledger.bytes((self.cause_of_programs(within.runner.segment), chunk.peak))
        index = within.call.segment
        yield Moment(within.phase, index, chunk.chunk, instruction.program, held, chunk.work)

    def _keep_chunk(self, instruction: Keep, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        self.ledger.hold(within.key(instruction.buffer), KEPT, self.cost.per_chunk(chunk.saved, self.sizes))
        yield from ()

    def _hand_on(self, instruction: HandOn, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        rows = self.cost.bytes_of_rows(within.runner, instruction.buffer, self.sizes, chunk)
        cause = self.cause_of_programs(within.runner.segment)
        self.ledger.hold((instruction.segment, instruction.taken), cause, rows)
        yield from ()

    def _free_chunk(self, instruction: Free, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        self.ledger.drop(within.key(instruction.buffer))
        yield from ()

    def _of_chunk(self, instruction: Any, within: _Bound, chunk: ChunkCost) -> Iterator[Moment]:
        """What the program has made is written where it belongs, or is handed on at once."""
        yield from ()

    # ---- instructions of a procedure

    def runner(self, call: Call) -> SegmentRunner:
        """What runs the programs of a call."""
        runner = self.cost.executor.runners[call.segment]
        assert runner is not None
        return runner

    def _allocate(self, instruction: Allocate, within: _Bound) -> Iterator[Moment]:
        if instruction.place == DEVICE:
            self._hold(instruction.buffer, within, instruction.own)
        self.out += self._elsewhere([instruction.buffer], within)
        yield from ()

    def _overwrite(self, instruction: Overwrite, within: _Bound) -> Iterator[Moment]:
        self.ledger.drop(within.key(instruction.old))
        yield from self._allocate(Allocate(instruction.buffer, place=instruction.place), within)

    def _free(self, instruction: Free, within: _Bound) -> Iterator[Moment]:
        self.ledger.drop(within.key(instruction.buffer))
        yield from ()

    def _elsewhere(self, buffers: Iterable[Buffer], within: _Bound) -> Any:
        """Bytes of those that lie elsewhere."""
        nodes = (within.values[b].node for b in buffers if b in within.call.way.elsewhere)
        return sum(self.cost.held_of(n, self.sizes) for n in nodes if n is not None)

    def _scale(self, instruction: Scale, within: _Bound) -> Iterator[Moment]:
        size = self._elsewhere([instruction.buffer], within)
        self.out, self.back = self.out + size, self.back + size
        yield from ()

    def _in_place(self, instruction: Normalize | Receive, within: _Bound) -> Iterator[Moment]:
        """What a buffer holds changes where it is."""
        yield from ()

    def _hold(self, buffer: Buffer, within: _Bound, own: bool = False) -> None:
        assert buffer.node is not None
        key = within.key(buffer)
        if buffer.by_chunk:
            size = self.cost.bytes_by_chunk(within.runner, buffer, self.sizes)
            self.ledger.hold(key, CAUSE_OF[buffer.kind], size)
            return
        size = self.cost.bytes_of_buffer(buffer, self.sizes)
        size = self.cost.share(size) if own or buffer.kind in BY_ROWS else size
        cause = CAUSE_OF.get(buffer.kind) or self.cause_of_output(key)
        self.ledger.hold(key, cause, size)

    def cause_of_output(self, key: Any) -> str:
        """What the rows that a segment makes are held for."""
        stored = isinstance(key, Value) and key.node in self.cost.first_use
        return STORED if stored else LOSS

    def _round(self, instruction: Round, within: _Bound) -> Iterator[Moment]:
        """A sum in a wider dtype becomes a gradient.

        Where others will be added both are held for the moment, see NOTE [rounded in place].
        """
        buffer, key, index = instruction.buffer, within.key(instruction.buffer), within.call.segment
        assert buffer.node is not None
        node = within.runner.twins[buffer.node]
        size = self.cost.bytes_of(node, self.sizes)
        alone = node in self.facts.parameters and self.cost.first_use[node] == index
        if not alone and key in self.ledger.held and self.ledger.held[key][1] != size:
            yield Moment("backward", index, None, None, self.ledger.bytes((PARAMETERS, size)))
            self.ledger.hold(key, PARAMETERS, size)

    def _chunks(self, loop: Chunks, within: _Bound) -> Iterator[Moment]:
        """A loop over chunks: the calls of its program."""
        segment, runner = within.runner.segment, within.runner
        assert COUNT_OF_CHUNK.keys() >= {type(inner) for inner in loop.body}, "what does it hold?"
        cause, keeps = self.cause_of_programs(segment), any(isinstance(inner, Keep) for inner in loop.body)
        for run in (inner for inner in loop.body if isinstance(inner, Run)):
            yield from self._blocks(run, within)
            self.back += self._elsewhere(run.inputs, within)
            calls, held = self.cost.calls_of(runner, run, self.sizes, loop), self.ledger.bytes()
            for call in reversed(calls) if loop.reverse else calls:
                more = call.peak + self._staged(run, within, call) + self._block(run, runner)
                now = {**held, cause: held.get(cause, 0) + more}
                work = call.work if runner.programs.in_turn else self.cost.share_of_work(call.work)
                yield Moment(within.phase, segment.index, call.chunk, run.program, now, work)
                if keeps:
                    self._save(within, self.cost.share(call.saved))
                    held = self.ledger.bytes()

    def _staged(self, run: Run, within: _Bound, call: ChunkCost) -> Any:
        """Bytes of the rows that a chunk reads and that lie elsewhere: they are there while it runs."""
        elsewhere = within.call.way.elsewhere
        rows = (b for b in run.inputs if b in elsewhere)
        return sum(self.cost.bytes_of_rows(within.runner, b, self.sizes, call) for b in rows)

    def _block(self, run: Run, runner: SegmentRunner) -> Any:
        """Bytes of the columns of other devices that are there while a chunk reads them."""
        return self.cost.bytes_of_block(runner, run, self.sizes) if run.by_blocks else 0

    def _blocks(self, run: Run, within: _Bound) -> Iterator[Moment]:
        """What has come block by block while the chunks ran, and what was sent back."""
        if not run.by_blocks:
            return
        states = within.runner.programs.buffers(BufferKind.STATE)
        of_states = within.runner.programs.buffers(BufferKind.STATE_GRADIENT) if run.adds else []
        kept = any(b.kind is BufferKind.KEPT for b in run.inputs)  # results of attention, mostly
        again = 2 if run.adds and not kept else 1  # the backward attends once more
        columns, calls = sent_by_blocks(self.sizes.tokens, self.cost.devices, self.sizes.chunk)
        for kind, buffers, times in (
            (CollectiveKind.ALL_GATHER, states, again),
            (CollectiveKind.REDUCE_SCATTER, of_states, 1),
        ):
            size = sum(self.cost.bytes_of_buffer(b, self.sizes) for b in buffers) * columns
            size = size / self.sizes.tokens if self.sizes.symbolic else size // self.sizes.tokens
            what = "states" if kind is CollectiveKind.ALL_GATHER else "gradients of states"
            name = f"{what} of segment {within.call.segment}"
            sent = Collective(kind, name, self.cost.devices, times * size, ahead=False, calls=times * calls)
            held = self.ledger.bytes((STATE, self._block(run, within.runner)))
            if buffers:
                yield Moment(within.phase, within.call.segment, None, kind.value, held, collective=sent)

    def _exchange(self, instruction: AllGather | ReduceScatter, within: _Bound) -> Iterator[Moment]:
        """Rows are packed, one piece for each device; what comes or goes has the size of the whole."""
        size = self.cost.bytes_of_buffer(instruction.buffer, self.sizes)
        gathers = isinstance(instruction, AllGather)
        kind = CollectiveKind.ALL_GATHER if gathers else CollectiveKind.REDUCE_SCATTER
        cause = CAUSE_OF[instruction.buffer.kind]
        held = self.ledger.bytes((cause, size + self.cost.share(size)))
        name = f"{'states' if gathers else 'gradients of states'} of segment {within.call.segment}"
        together = Collective(kind, name, self.cost.devices, size, ahead=False)
        yield Moment(within.phase, within.call.segment, None, kind.value, held, collective=together)

    def _send(self, instruction: Send, within: _Bound) -> Iterator[Moment]:
        """What the neighbour begins with is packed."""
        size = self.cost.bytes_at_border(within.runner, instruction.buffer, self.sizes)
        gradient = instruction.buffer.kind is BufferKind.STATE_GRADIENT
        name = f"{'gradients of states' if gradient else 'states'} of segment {within.call.segment}"
        sent = Collective(CollectiveKind.SEND, name, self.cost.devices, size, ahead=False)
        held = self.ledger.bytes((CAUSE_OF[instruction.buffer.kind], size))
        yield Moment(within.phase, within.call.segment, None, sent.kind.value, held, collective=sent)

    def _save(self, within: _Bound, size: Any) -> None:
        """More is saved of a segment."""
        key = Value(ValueKind.KEPT, segment=within.call.segment)
        before = self.ledger.held[key][1] if key in self.ledger.held else 0
        self.ledger.hold(key, KEPT, before + size)

    def saved_bytes(self, call: Call) -> Any:
        """Bytes that the forward of a segment saves."""
        runs = ((loop, run) for loop, run in call.procedure.runs() if run.price is not None)
        runner = self.runner(call)
        calls = (c for loop, run in runs for c in self.cost.calls_of(runner, run, self.sizes, loop))
        return self.cost.share(sum(c.saved for c in calls))

    def cause_of_programs(self, segment: Segment) -> str:
        """What the bytes of a segment's programs are held for."""
        return LOSS if segment.index == len(self.facts.segments) - 1 and not segment.mixings else BODIES


class _Bound:
    """A procedure on the values of a call.

    Attributes:
        call, runner: of the segment.
        phase: "forward" or "backward".
    """

    def __init__(self, call: Call, runner: SegmentRunner, phase: str) -> None:
        self.call, self.runner, self.phase = call, runner, phase
        self.values = call.bindings()

    def key(self, buffer: Buffer) -> Any:
        """What a buffer is held as: a value of the step, or the segment's own."""
        return self.values.get(buffer, (self.call.segment, buffer))


COUNT: Mapping[type, Callable[[ProcedureWalk, Any, _Bound], Iterator[Moment]]] = {
    Allocate: ProcedureWalk._allocate,
    Overwrite: ProcedureWalk._overwrite,
    Free: ProcedureWalk._free,
    Chunks: ProcedureWalk._chunks,
    Normalize: ProcedureWalk._in_place,
    Scale: ProcedureWalk._scale,
    Receive: ProcedureWalk._in_place,
    Round: ProcedureWalk._round,
    AllGather: ProcedureWalk._exchange,
    ReduceScatter: ProcedureWalk._exchange,
    Send: ProcedureWalk._send,
}
#: What the body of a loop over chunks is made of.
COUNT_OF_CHUNK: Mapping[type, Callable[[ProcedureWalk, Any, _Bound, ChunkCost], Iterator[Moment]]] = {
    Run: ProcedureWalk._run_chunk,
    Keep: ProcedureWalk._keep_chunk,
    Roll: ProcedureWalk._roll_to,
    HandOn: ProcedureWalk._hand_on,
    Free: ProcedureWalk._free_chunk,
    Hand: ProcedureWalk._of_chunk,
    WriteRows: ProcedureWalk._of_chunk,
    ZeroRows: ProcedureWalk._of_chunk,
}
