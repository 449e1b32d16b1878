"""checker: proves of a procedure, without running it, that it holds what it reads and finishes what it makes.

Each instruction is followed in order, with what is known of the rows of each buffer. A loop over chunks is
followed once: what its first chunk may do the others may do, where rows of earlier chunks are concerned the
direction of the loop decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .buffer_states import BufferStates, Fault, Rows
from .instructions import (
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Hand,
    Instruction,
    Keep,
    Normalize,
    Over,
    Overwrite,
    Procedure,
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
from .saving import ALL
from .text import line


class UnsoundProcedure(Exception):
    """A procedure reads what is not there, or leaves undone what it promises.

    Attributes:
        procedure: its name.
        instruction: the one at which that is seen; None: the end.
    """

    def __init__(self, procedure: Procedure, instruction: Instruction | None, words: str) -> None:
        place = "at the end" if instruction is None else f"at `{line(instruction)}`"
        super().__init__(f"procedure {procedure.name}, {place}: {words}")
        self.procedure, self.instruction = procedure, instruction


def check(procedure: Procedure) -> None:
    """Prove that a procedure is sound.

    What is read is held and complete; each row is written once; sums begin with zero, and are finished before
    they are read; what is allocated is freed or handed over; every result of a program is used.

    Raises:
        UnsoundProcedure: it is not.
    """
    state = BufferStates(procedure)
    for instruction in _joined(procedure):
        _step(state, instruction)
    try:
        state.end()
    except Fault as fault:
        raise UnsoundProcedure(procedure, None, str(fault)) from None


def _joined(procedure: Procedure) -> Iterator[Instruction]:
    """The instructions, with loops over neighbouring rows of the sequence as the loop over all that they are.

    Raises:
        UnsoundProcedure: they leave rows out, run some twice, or do different things with them.
    """
    loop: Chunks | None = None
    for instruction in (*procedure.body, None):
        if loop is not None:
            if not isinstance(instruction, Chunks) or _body_of(instruction) != _body_of(loop):
                raise UnsoundProcedure(procedure, loop, "the rest of the rows is not run in the same way")
            first, then = (instruction, loop) if loop.reverse else (loop, instruction)
            if first.share[1] != then.share[0] or instruction.share[0] >= instruction.share[1]:
                raise UnsoundProcedure(procedure, instruction, "rows are left out, or run twice")
            instruction = replace(loop, share=(first.share[0], then.share[1]))
            loop = None
        if isinstance(instruction, Chunks) and instruction.share != ALL:
            loop = instruction
        elif instruction is not None:
            yield instruction


def _body_of(loop: Chunks) -> tuple[Any, ...]:
    """What a loop does with its rows, whatever is saved of them."""
    body = (replace(i, price=None) if isinstance(i, Run) else i for i in loop.body)
    return (*body, loop.reverse, loop.over)


def _step(state: BufferStates, instruction: Instruction) -> None:
    try:
        CHECKS[type(instruction)](state, instruction)
    except Fault as fault:
        raise UnsoundProcedure(state.procedure, instruction, str(fault)) from None


# ---- memory


def _allocate(state: BufferStates, instruction: Allocate) -> None:
    buffer = instruction.buffer
    if buffer.kind is BufferKind.SUM:
        assert buffer.node is not None
        state.need(Buffer(BufferKind.CONSTANT, buffer.node))  # whose memory layout it has
    state.hold(buffer, Rows.ZERO if instruction.zero else Rows.ANYTHING)


def _overwrite(state: BufferStates, instruction: Overwrite) -> None:
    state.complete(instruction.old)
    if instruction.old in state.lies_on.values():
        raise Fault(f"{instruction.old.name} is overwritten by two")
    state.hold(instruction.buffer, Rows.ANYTHING)
    state.lies_on[instruction.buffer] = instruction.old


def _free(state: BufferStates, instruction: Free) -> None:
    buffer = instruction.buffer
    state.need(buffer)
    if buffer in state.procedure.parameters or buffer in state.procedure.results:
        raise Fault(f"{buffer.name} belongs to who has called")
    if buffer.kind is BufferKind.STATE_GRADIENT and buffer not in state.finished:
        raise Fault(f"{buffer.name} is freed before its rows are differentiated")
    if buffer not in state.read:
        raise Fault(f"{buffer.name} is freed and was never read")
    shared = buffer.kind is BufferKind.STATE_GRADIENT and state.procedure.several
    if shared and buffer not in state.summed and buffer not in state.received:
        raise Fault(f"{buffer.name} is freed without what other devices have added to it")
    del state.rows[buffer]


# ---- loops


def _chunks(state: BufferStates, loop: Chunks) -> None:
    if state.loop is not None:
        raise Fault("a loop over chunks within another one")
    state.loop, state.written = loop, set()
    for instruction in loop.body:
        _step(state, instruction)
    state.used()
    for buffer in state.written:
        state.rows[buffer] = _after(state.rows[buffer], loop.over)
    state.loop = None


def _after(rows: Rows, over: Over) -> Rows:
    """What rows hold after a loop that has written them."""
    if over is Over.COUNTED:
        return Rows.COMPLETE if rows is Rows.ZERO else Rows.COUNTED
    if over is Over.NOT_COUNTED and rows is not Rows.COUNTED:
        raise Fault("rows that do not count are written, and those that count are not")
    return Rows.COMPLETE


def _run(state: BufferStates, instruction: Run) -> None:
    loop = state.loop
    if loop is None:
        raise Fault("a program for a chunk is called outside of a loop")
    state.used()
    kept = Buffer(BufferKind.KEPT)
    if instruction.price is not None and kept not in (*instruction.inputs, *instruction.results):
        raise Fault("what is to be saved is neither made nor read")
    for buffer in instruction.inputs:
        _reads(state, loop, instruction, buffer)
        state.read.add(buffer)
    for buffer in instruction.writes:
        state.unwritten(buffer)
        if loop.reverse:
            raise Fault(f"{buffer.name}: in reverse no rows of earlier chunks are there to be read")
        state.written.add(buffer)
    for buffer in instruction.rewrites:
        state.complete(buffer)
    for buffer in instruction.finishes:
        _finish(state, loop, instruction, buffer)
    for buffer in instruction.adds:
        if state.need(buffer) is Rows.ANYTHING:
            raise Fault(f"{buffer.name} is added to, and does not begin with zero")
        if buffer in state.rounded:
            raise Fault(f"{buffer.name} is added to after it was rounded")
        state.added.add(buffer)
        state.written.add(buffer)
    state.results = set(instruction.results)


def _reads(state: BufferStates, loop: Chunks, run: Run, buffer: Buffer) -> None:
    """An input is held, and holds what it should."""
    if buffer.kind is BufferKind.KEPT:
        if not state.kept or loop.over is not Over.RUN:
            raise Fault("nothing is kept of its chunks")
        return
    state.need(buffer)
    if buffer.kind is BufferKind.SUM or buffer in run.adds or buffer in run.writes:
        return
    state.complete(buffer)
    there = run.own or buffer in state.gathered or buffer in state.received
    if buffer.kind is BufferKind.STATE and state.procedure.several and not there:
        raise Fault(f"rows of {buffer.name} are read that other devices have")
    lost = [new for new, old in state.lies_on.items() if old == buffer]
    if any(new in state.written or state.rows[new] is not Rows.ANYTHING for new in lost):
        raise Fault(f"rows of {buffer.name} are read after they were overwritten")


def _finish(state: BufferStates, loop: Chunks, run: Run, buffer: Buffer) -> None:
    """The rows of a state gradient are complete when they are differentiated."""
    state.need(buffer)
    if buffer in state.finished:
        raise Fault(f"rows of {buffer.name} are differentiated twice")
    if buffer in run.adds:
        if not loop.reverse:
            raise Fault(f"{buffer.name}: later chunks, which add to its rows, must come first")
    elif buffer not in state.added:
        raise Fault(f"{buffer.name} is differentiated before anything was added to it")
    state.finished.add(buffer)


def _write_rows(state: BufferStates, instruction: WriteRows) -> None:
    buffer = instruction.buffer
    if buffer not in state.results:
        raise Fault(f"there is no result for {buffer.name}")
    if instruction.add:
        state.complete(buffer)
    else:
        state.unwritten(buffer)
    state.results.remove(buffer)
    state.written.add(buffer)


def _roll(state: BufferStates, instruction: Roll) -> None:
    buffer = instruction.buffer
    if state.loop is None or not state.loop.reverse or buffer.kind is not BufferKind.STATE_GRADIENT:
        raise Fault(f"columns of {buffer.name} may be left that are read later")
    state.rows.setdefault(buffer, Rows.ZERO)


def _hand(state: BufferStates, instruction: Hand) -> None:
    buffer = instruction.buffer
    if buffer not in state.procedure.passing:
        raise Fault(f"no other segment waits for {buffer.name}")
    if buffer not in state.results:
        raise Fault(f"there is no result for {buffer.name}")
    state.results.remove(buffer)


def _zero_rows(state: BufferStates, instruction: ZeroRows) -> None:
    buffer = instruction.buffer
    if state.loop is None or state.loop.over is not Over.NOT_COUNTED:
        raise Fault(f"rows of {buffer.name} are zeroed that count")
    state.unwritten(buffer)
    state.written.add(buffer)


def _keep(state: BufferStates, instruction: Keep) -> None:
    if instruction.buffer not in state.results:
        raise Fault("there is nothing to keep")
    state.results.remove(instruction.buffer)
    state.kept = True


# ---- what is done to whole buffers


def _normalize(state: BufferStates, instruction: Normalize) -> None:
    state.complete(instruction.buffer)
    if instruction.buffer in state.read or instruction.buffer in state.scaled:
        raise Fault(f"{instruction.buffer.name} is changed after it was read")
    state.scaled.add(instruction.buffer)


def _scale(state: BufferStates, instruction: Scale) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if buffer in state.scaled or buffer in state.rounded:
        raise Fault(f"{buffer.name} is multiplied twice, or after it was rounded")
    state.scaled.add(buffer)


def _round(state: BufferStates, instruction: Round) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if buffer in state.rounded:
        raise Fault(f"{buffer.name} is rounded twice")
    state.rounded.add(buffer)


# ---- rows on several devices


def _all_gather(state: BufferStates, instruction: AllGather) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if buffer in state.gathered:
        raise Fault(f"{buffer.name} is gathered twice")
    state.gathered.add(buffer)


def _reduce_scatter(state: BufferStates, instruction: ReduceScatter) -> None:
    buffer = instruction.buffer
    state.need(buffer)
    if buffer not in state.added or buffer in state.summed:
        raise Fault(f"{buffer.name} is summed before anything was added to it, or twice")
    if (buffer in state.finished) is not instruction.others:
        raise Fault(f"{buffer.name}: what this device has added is differentiated twice, or never")
    state.summed.add(buffer)
    state.finished.discard(buffer)


def _receive(state: BufferStates, instruction: Receive) -> None:
    buffer = instruction.buffer
    state.need(buffer)
    if buffer in state.read or buffer in state.added or buffer in state.received:
        raise Fault(f"{buffer.name} is received after it was read or added to, or twice")
    state.received.add(buffer)


def _send(state: BufferStates, instruction: Send) -> None:
    buffer = instruction.buffer
    done = state.finished if buffer.kind is BufferKind.STATE_GRADIENT else state.rows
    if buffer not in done or state.rows[buffer] is not Rows.COMPLETE:
        raise Fault(f"{buffer.name} is sent before it is complete")
    state.sent.add(buffer)


CHECKS: Mapping[type, Callable[[BufferStates, Any], None]] = {
    Allocate: _allocate,
    Overwrite: _overwrite,
    Free: _free,
    Chunks: _chunks,
    Run: _run,
    WriteRows: _write_rows,
    Roll: _roll,
    Hand: _hand,
    ZeroRows: _zero_rows,
    Keep: _keep,
    Normalize: _normalize,
    Scale: _scale,
    Round: _round,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    Receive: _receive,
    Send: _send,
}
