"""checker: proves of a procedure, without running it, that it holds what it reads and finishes what it makes.

Each instruction is followed in order, with what is known of the rows of each buffer. A loop over chunks is
followed once: what its first chunk may do the others may do, where rows of earlier chunks are concerned the
direction of the loop decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..graph.facts import shape_of, tensors_of
from .buffer_states import BufferStates, Rows
from .faults import Fault, place_of
from .instructions import (
    BY_COLUMNS,
    BY_ROWS,
    DEVICE,
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
from .procedure import Procedure
from .run_checks import check_prices, check_run, names
from .saving import ALL
from .signature import PROGRAMS, Signature
from .text import line


class UnsoundProcedure(Exception):
    """A procedure reads what is not there, or leaves undone what it promises.

    Attributes:
        procedure: that.
        instruction: the one at which that is seen, or which had to do last with what is left; None: what is
            wrong is wrong with the procedure as a whole.
    """

    def __init__(self, procedure: Procedure, instruction: Instruction | None, words: str) -> None:
        super().__init__(f"procedure {procedure.name}{place_of(instruction, line)}: {words}")
        self.procedure, self.instruction = procedure, instruction


def check(procedure: Procedure) -> None:
    """Prove that a procedure is sound.

    What is read is held and complete; each row is written once; sums begin with zero, and are finished before
    they are read; what is allocated is freed or handed over; every result of a program is used. Programs are
    given what they take, in order, and make what they return (`Signature`); so does the procedure.

    Raises:
        UnsoundProcedure: it is not.
    """
    signature = procedure.signature
    try:
        if signature is None or procedure.name not in PROGRAMS:
            raise Fault("what it takes and makes is not known")
        _has_interface(procedure, signature)
        state = BufferStates(procedure, signature)
        for instruction in _joined(procedure):
            _step(state, instruction)
        check_prices(procedure, signature)
        state.end()
    except Fault as fault:
        raise UnsoundProcedure(procedure, fault.instruction, str(fault)) from None


def _has_interface(procedure: Procedure, signature: Signature) -> None:
    """It takes and makes what it is called for."""
    expected, way = signature.interface(procedure.name), signature.way
    for words, found, other in (
        ("is given", procedure.parameters, expected.parameters),
        ("hands over", procedure.results, expected.results),
    ):
        if found != other:
            raise Fault(f"it {words} {names(found)}, and not {names(other)}")
    if len(procedure.passing) != len(expected.passing) or set(procedure.passing) != expected.passing:
        raise Fault(f"it shares {names(procedure.passing)} with its neighbours, a chunk at a time")
    for loop in procedure.body:
        if isinstance(loop, Chunks) and loop.size is not signature.size:
            raise Fault(f"its chunks are cut by {loop.size.value}, and not by {signature.size.value}", loop)
    if procedure.several is not way.several:
        raise Fault("its rows are those of one of several devices, or all, and the other is so")


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
    return (*body, loop.reverse, loop.over, loop.size)


def _step(state: BufferStates, instruction: Instruction) -> None:
    try:
        if type(instruction) not in CHECKS:
            raise Fault(f"there is no instruction {type(instruction).__name__}")
        own = _buffer_of(instruction)
        if own is not None and not state.signature.knows(own):
            raise Fault(f"{own.name} is no buffer of the segment")
        CHECKS[type(instruction)](state, instruction)
    except UnsoundProcedure:
        raise
    except Fault as fault:
        raise UnsoundProcedure(state.procedure, fault.instruction or instruction, str(fault)) from None
    except Exception as error:  # it is so broken that nobody has thought of it
        words = f"{type(error).__name__}: {error}"
        raise UnsoundProcedure(state.procedure, instruction, words) from error
    touched = (*instruction.results, *instruction.adds) if isinstance(instruction, Run) else (own,)
    state.made_by.update((b, instruction) for b in touched if b is not None)


def _buffer_of(instruction: Instruction) -> Buffer | None:
    """The buffer to which something is done; a loop and a program have several."""
    return None if isinstance(instruction, Chunks | Run) else instruction.buffer


# ---- memory


def _allocate(state: BufferStates, instruction: Allocate) -> None:
    buffer = instruction.buffer
    if buffer.kind is BufferKind.SUM:
        assert buffer.node is not None
        state.need(Buffer(BufferKind.CONSTANT, buffer.node))  # whose memory layout it has
    if buffer.kind is BufferKind.STATE and buffer.by_chunk and not instruction.zero:
        raise Fault(f"{buffer.name} goes from chunk to chunk, and does not begin with zeros")
    _lies_where_it_should(state, buffer, instruction.place)
    if instruction.own is not (buffer.kind in BY_COLUMNS and state.signature.holds_own_states):
        raise Fault(f"{buffer.name} has the rows of this device alone, or all, and the other is so")
    state.hold(buffer, Rows.ZERO if instruction.zero else Rows.ANYTHING)


def _lies_where_it_should(state: BufferStates, buffer: Buffer, place: str) -> None:
    way = state.signature.way
    if place != (way.place if buffer in way.elsewhere else DEVICE):
        raise Fault(f"{buffer.name} does not lie on {place}")


def _overwrite(state: BufferStates, instruction: Overwrite) -> None:
    new, old = instruction.buffer, instruction.old
    state.complete(old)
    if old in state.lies_on.values():
        raise Fault(f"{old.name} is overwritten by two")
    if old not in state.signature.way.overwrites or new.kind is not BufferKind.GRADIENT:
        raise Fault(f"{old.name} may not be overwritten")
    if not _are_alike(new, old) or (old.kind is BufferKind.ROWS and old.node is not new.node):
        raise Fault(f"{old.name} has another form, or is another one's")
    for buffer in (new, old):
        _lies_where_it_should(state, buffer, instruction.place)
    state.hold(new, Rows.ANYTHING)
    state.lies_on[new] = old
    if instruction.zero:
        state.zeroed.add(new)


def _are_alike(one: Buffer, other: Buffer) -> bool:
    if one.node is None or other.node is None:
        return False
    dtypes = {tensors_of(n)[0].dtype for n in (one.node, other.node)}
    return len(dtypes) == 1 and shape_of(one.node) == shape_of(other.node)


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
    shared = shared and not state.signature.holds_own_states  # what others add comes with each chunk
    if shared and buffer not in state.summed and buffer not in state.received:
        raise Fault(f"{buffer.name} is freed without what other devices have added to it")
    del state.rows[buffer]


# ---- loops


def _chunks(state: BufferStates, loop: Chunks) -> None:
    if state.loop is not None:
        raise Fault("a loop over chunks within another one")
    if not loop.body:
        raise Fault("nothing is done in it")
    if (loop.over is Over.RUN) is (state.procedure.name == "loss"):
        raise Fault("these are not the rows that it has to run")
    state.loop, state.written = loop, set()
    for instruction in loop.body:
        _step(state, instruction)
    state.used()
    for buffer in state.written:
        _rest_is_zero(state, loop, buffer)
        state.rows[buffer] = _after(state.rows[buffer], loop.over)
    state.loop = None


def _rest_is_zero(state: BufferStates, loop: Chunks, buffer: Buffer) -> None:
    """Where rows are left out, they are zero before the others are written."""
    anything = state.rows[buffer] is Rows.ANYTHING and buffer not in state.zeroed
    if state.signature.way.left_out and loop.over is Over.RUN and buffer.kind in BY_ROWS and anything:
        raise Fault(f"rows of {buffer.name} that are not run hold anything", state.made_by.get(buffer))


def _after(rows: Rows, over: Over) -> Rows:
    """What rows hold after a loop that has written them."""
    if over is Over.COUNTED:
        return Rows.COMPLETE if rows is Rows.ZERO else Rows.COUNTED
    if over is Over.NOT_COUNTED and rows is not Rows.COUNTED:
        raise Fault("rows that do not count are written, and those that count are not")
    return Rows.COMPLETE


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
    buffer = instruction.buffer
    state.complete(buffer)
    if buffer in state.read or buffer in state.scaled:
        raise Fault(f"{buffer.name} is changed after it was read")
    of_loss = buffer.kind is BufferKind.COTANGENT and state.procedure.name == "loss"
    if not of_loss or not state.signature.way.half:
        raise Fault(f"{buffer.name} is divided by what nobody multiplies by")
    state.scaled.add(buffer)


def _scale(state: BufferStates, instruction: Scale) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if state.procedure.name != "scaling":
        raise Fault("the gradient of the loss is not known")
    if buffer in state.scaled or buffer in state.rounded:
        raise Fault(f"{buffer.name} is multiplied twice, or after it was rounded")
    state.scaled.add(buffer)


def _round(state: BufferStates, instruction: Round) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if buffer in state.rounded:
        raise Fault(f"{buffer.name} is rounded twice")
    before = state.procedure.name in ("loss", "scaling") and buffer not in state.scaled
    if before or buffer.kind is not BufferKind.SUM:
        raise Fault(f"{buffer.name} is rounded before it is multiplied, or is no sum")
    state.rounded.add(buffer)


# ---- rows on several devices


def _all_gather(state: BufferStates, instruction: AllGather) -> None:
    buffer = instruction.buffer
    state.complete(buffer)
    if state.signature.holds_own_states:
        raise Fault(f"{buffer.name} has no room for the rows of others")
    if buffer in state.gathered:
        raise Fault(f"{buffer.name} is gathered twice")
    state.gathered.add(buffer)


def _reduce_scatter(state: BufferStates, instruction: ReduceScatter) -> None:
    buffer = instruction.buffer
    state.need(buffer)
    if state.signature.holds_own_states:
        raise Fault(f"{buffer.name} has no rows of others")
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
    Run: check_run,
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
