"""run_checks: a procedure calls the programs of its segment with what they take, and takes what they make."""

from __future__ import annotations

from .buffer_states import BufferStates, Rows
from .faults import Fault
from .instructions import Buffer, BufferKind, Chunks, Over, Run
from .procedure import Procedure
from .signature import KEPT, Signature

#: What of a call of a program must be as it was traced, and what that is.
PARTS_OF_A_RUN = {
    "inputs": "reads",
    "results": "returns",
    "writes": "writes",
    "adds": "adds to",
    "finishes": "finishes",
    "rewrites": "writes again",
}


def check_run(state: BufferStates, instruction: Run) -> None:
    """A program reads what is there, and takes and makes what it was traced with.

    Raises:
        Fault: not so.
    """
    loop = state.loop
    if loop is None:
        raise Fault("a program for a chunk is called outside of a loop")
    state.used()
    if instruction.price is not None and KEPT not in (*instruction.inputs, *instruction.results):
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
    _is_as_it_was_made(state, instruction)


def _is_as_it_was_made(state: BufferStates, run: Run) -> None:
    """A program is one that the procedure may call; it takes and makes what it was traced with."""
    name = state.procedure.name
    if run.program not in state.signature.programs(name):
        raise Fault(f"{run.program!r} is no program for a {name}")
    expected = state.signature.run(name, run.program)
    for attribute, words in PARTS_OF_A_RUN.items():
        found, other = getattr(run, attribute), getattr(expected, attribute)
        if found != other:
            raise Fault(f"the program {words} {names(other)}, and not {names(found)}")
    if run.own is not expected.own:
        raise Fault("the program reads the columns of its own rows alone, or others, and the other is so")
    if run.by_blocks is not expected.by_blocks:
        raise Fault("columns of other devices come block by block, or are there, and the other is so")


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
    of_loss = buffer.kind is BufferKind.COTANGENT and state.procedure.name == "loss"
    if of_loss and state.signature.way.half and buffer not in state.scaled:
        raise Fault(f"{buffer.name} is not normalized, and gradients in float16 vanish")
    there = run.own or run.by_blocks or buffer in state.gathered or buffer in state.received
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


def check_prices(procedure: Procedure, signature: Signature) -> None:
    """What is saved of rows is read of them.

    Raises:
        Fault: it is not.
    """
    for loop, run in procedure.runs():
        try:
            expected = signature.price(procedure.name, loop, run)
        except KeyError:
            raise Fault("what is saved of these rows is not the same for all", loop) from None
        if run.price != expected:
            raise Fault("something else is saved of these rows", run)


def names(buffers: tuple[Buffer, ...]) -> str:
    """Names of buffers, in a row."""
    return ", ".join(b.name for b in buffers) or "nothing"
