"""The interpreter: runs the instructions of a segment's step on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...passes.graph.facts import tensors_of
from ...passes.step.instructions import (
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
from ...passes.step.procedure import Procedure
from ...passes.step.row_chunks import ChunkSize
from ...passes.step.saving import is_within
from . import rows_elsewhere
from .column_blocks import ColumnBlocks
from .own_rows import OwnRows
from .segment_runner import SegmentRunner
from .step_blocks import RowBlock, StepData

Blocks = Callable[[Over, ChunkSize], list[RowBlock]]


@dataclass
class Frame:
    """What a procedure holds while it runs.

    Attributes:
        runner: of the segment.
        blocks: that a loop runs over.
        tensors: by buffer; the parameters of the procedure to begin with, and nobody else holds the mapping.
        like: a tensor on the device of the segment.
        kept: by index of the chunk.
        passing: buffers of which the rows of one chunk are there, see `Procedure.passing`.
        columns: of state gradients that are held in part, the first column that is there, and the end.
        own_states: states, and their gradients, that have the rows of this device alone.
        exchange: brings columns of other devices while the loop runs that needs them.
        function: the autograd node that will return what is rounded, whose inputs are the streamed inputs of
            the segment, then its constants.
        scale: what `Scale` multiplies by, beside `unit`.
        unit: what `Normalize` has divided by.
        index, block: the chunk that is run.
        results: of the chunk's program, as far as they are not written yet.
        workspace: by dtype, see `passes.s5_lower.workspace`.
    """

    runner: SegmentRunner
    step: StepData
    tensors: dict[Buffer, Tensor]
    like: Tensor
    blocks: Blocks
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    passing: frozenset[Buffer] = frozenset()
    columns: dict[Buffer, tuple[int, int]] = field(default_factory=dict)
    own_states: set[Buffer] = field(default_factory=set)
    exchange: ColumnBlocks | None = None
    function: Any = None
    scale: Tensor | None = None
    unit: Tensor | None = None
    index: int = 0
    block: RowBlock | None = None
    results: dict[Buffer, Any] = field(default_factory=dict)
    workspace: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """That of the segment."""
        return self.like.device

    def workspace_of(self, dtype: torch.dtype) -> Tensor:
        """A tensor of shape (0,) in this dtype, with the memory that the last chunk's had."""
        return self.workspace.setdefault(dtype, torch.empty(0, dtype=dtype, device="cpu")).resize_(0)


def run(procedure: Procedure, frame: Frame) -> list[Tensor]:
    """Run a procedure.

    Returns:
        Its results, in the shapes and dtypes of its buffers; the frame holds them no more. What is kept for
        the backward is not among them: it stays in the frame.

    Raises:
        CompileError: a program cannot be traced.
    """
    for instruction in procedure.body:
        execute(instruction, frame)
    return results_of(procedure, frame)


def results_of(procedure: Procedure, frame: Frame) -> list[Tensor]:
    """What a procedure hands over, in the shapes and dtypes of its buffers; the frame holds it no more."""
    return [frame.tensors.pop(b) for b in procedure.results if b.kind is not BufferKind.KEPT]


def prepare(procedure: Procedure, frame: Frame) -> None:
    """Make the programs of a procedure, so that a failure comes before it has begun.

    Raises:
        CompileError: a program cannot be traced.
    """
    runner, step = frame.runner, frame.step
    for loop, call in procedure.runs():
        for _, block in blocks_of(loop, frame) if call.adds else ():
            extent = _block_of(call, block, frame).extent
            numbers = runner.numbers(extent, step.seed, step.of(block.part))
            runner.program(call.program, extent, step, numbers, call.price)


def execute(instruction: Instruction, frame: Frame) -> None:
    """Run one instruction."""
    EXECUTE[type(instruction)](instruction, frame)


def _allocate(instruction: Allocate, frame: Frame) -> None:
    buffer = instruction.buffer
    frame.tensors[buffer] = _new(buffer, frame, instruction.zero, instruction.place, instruction.own)
    if instruction.own:
        frame.own_states.add(buffer)


def _new(buffer: Buffer, frame: Frame, zero: bool, place: str, own: bool = False) -> Tensor:
    assert buffer.node is not None
    if place != DEVICE:
        return frame.runner.allocate_elsewhere(buffer.node, frame.step, place, zero)
    if buffer.by_chunk:
        chunks = len(frame.blocks(Over.RUN, ChunkSize.LAYER))
        return frame.runner.states_of_recurrence(buffer, chunks, frame.step, frame.like)
    if buffer.kind is BufferKind.SUM:  # in the memory layout of what it is the gradient of
        constant = frame.tensors[Buffer(BufferKind.CONSTANT, buffer.node)]
        return torch.zeros_like(constant, dtype=frame.runner.sum_dtype(buffer, constant.dtype))
    own = own or buffer.kind in BY_ROWS
    return frame.runner.allocate(buffer.node, frame.step, frame.like, zero, buffer.wide, own=own)


def _overwrite(instruction: Overwrite, frame: Frame) -> None:
    buffer, old = instruction.buffer, instruction.old
    memory = frame.tensors[old]
    assert buffer.node is not None
    fits = memory.is_contiguous() and memory.dtype == tensors_of(buffer.node)[0].dtype
    fits = fits and rows_elsewhere.is_elsewhere(memory) is (instruction.place != DEVICE)
    # a gradient may be held by whoever has asked for it; a streamed input of this kind is known not to be
    if fits and (old.kind is BufferKind.ROWS or frame.step.owned.take(memory)):
        frame.tensors[buffer] = memory
    else:
        frame.tensors[buffer] = _new(buffer, frame, instruction.zero, instruction.place)


def _free(instruction: Free, frame: Frame) -> None:
    if instruction.buffer.kind is BufferKind.KEPT:  # of the chunk that is run
        del frame.kept[frame.index]
        return
    del frame.tensors[instruction.buffer]
    frame.columns.pop(instruction.buffer, None)
    frame.own_states.discard(instruction.buffer)


def _chunks(instruction: Chunks, frame: Frame) -> None:
    blocks = blocks_of(instruction, frame)
    order = blocks[::-1] if instruction.reverse else blocks
    elsewhere = _read_elsewhere(instruction, frame)
    if any(inner.by_blocks for inner in instruction.body if isinstance(inner, Run)):
        assert frame.step.own is not None
        frame.exchange = ColumnBlocks(frame.step.own, frame.step.chunk)
    for place, (frame.index, frame.block) in enumerate(order):
        for _, following in order[place + 1 : place + 2] if elsewhere else ():  # its rows come meanwhile
            for buffer in elsewhere:
                rows_elsewhere.ask_for(_rows(buffer, frame, following))
        for inner in instruction.body:
            execute(inner, frame)
        for buffer in elsewhere:
            rows_elsewhere.give_back(_rows(buffer, frame, frame.block))


def blocks_of(loop: Chunks, frame: Frame) -> list[tuple[int, RowBlock]]:
    """The chunks of a loop, with their places among all."""
    blocks = enumerate(frame.blocks(loop.over, loop.size))
    return [(k, b) for k, b in blocks if is_within(b.extent.start, frame.step.total, loop.share)]


def _run(instruction: Run, frame: Frame) -> None:
    assert frame.block is not None
    block = _block_of(instruction, frame.block, frame)
    kind, inputs = instruction.program, instruction.inputs
    with _turn(instruction, block, frame):
        found = frame.runner.call(kind, block, frame.step, frame.index, frame, inputs, instruction.price)
    for buffer in instruction.results:
        frame.results[buffer] = found if buffer.kind is BufferKind.KEPT else found.pop(0)


def _turn(run: Run, block: RowBlock, frame: Frame) -> AbstractContextManager[None]:
    """Within: columns of other devices come, if the program reads any."""
    if not run.by_blocks:
        return nullcontext()
    assert frame.exchange is not None
    return frame.exchange.turn(block.extent.start)


def _block_of(run: Run, block: RowBlock, frame: Frame) -> RowBlock:
    """The rows that a program runs on, with the columns that it reads."""
    if run.by_blocks:
        assert frame.step.own is not None
        return RowBlock(frame.step.own.of_others(block.extent), block.part)
    return block.own() if run.own else block


def _read_elsewhere(loop: Chunks, frame: Frame) -> list[Buffer]:
    """What the programs of a loop read by rows and does not lie on the device."""
    read = (b for inner in loop.body if isinstance(inner, Run) for b in inner.inputs if b.kind in BY_ROWS)
    there = (b for b in dict.fromkeys(read) if b in frame.tensors and b not in frame.passing)
    return [b for b in there if rows_elsewhere.is_elsewhere(frame.tensors[b])]


def _write_rows(instruction: WriteRows, frame: Frame) -> None:
    rows = _rows(instruction.buffer, frame, frame.block)
    value = frame.results.pop(instruction.buffer).reshape(rows.shape)
    if _lies_otherwise(value, rows):
        value = value.clone()
    rows.add_(value.to(rows.device)) if instruction.add else rows.copy_(value)
    rows_elsewhere.give_back(rows)


def _roll(instruction: Roll, frame: Frame) -> None:
    assert frame.block is not None
    buffer, extent = instruction.buffer, frame.block.extent
    low, end = extent.low, extent.low + extent.columns
    before = frame.columns.get(buffer)
    if before == (low, end):  # the same rows of other samples
        return
    assert buffer.node is not None
    rows = frame.runner.columns(buffer, end - low, frame.step, frame.like)
    if before is not None and before[0] < end:
        common = end - before[0]
        old = frame.tensors[buffer].narrow(buffer.dim, 0, common)
        rows.narrow(buffer.dim, before[0] - low, common).copy_(old)
    frame.tensors[buffer], frame.columns[buffer] = rows, (low, end)


def _hand(instruction: Hand, frame: Frame) -> None:
    frame.tensors[instruction.buffer] = frame.results.pop(instruction.buffer)


def _lies_otherwise(value: Tensor, rows: Tensor) -> bool:
    """True if a tensor shares the memory that it is written to in another order.

    A gradient may be a view of the cotangent over which it is written.
    """
    if value.untyped_storage()._cdata != rows.untyped_storage()._cdata:
        return False
    return value.stride() != rows.stride() or value.storage_offset() != rows.storage_offset()


def _zero_rows(instruction: ZeroRows, frame: Frame) -> None:
    rows = _rows(instruction.buffer, frame, frame.block).zero_()
    rows_elsewhere.give_back(rows)


def _rows(buffer: Buffer, frame: Frame, block: RowBlock | None) -> Tensor:
    """The rows of a chunk, as a view."""
    assert buffer.node is not None and block is not None
    return frame.runner.view(frame.runner.twins[buffer.node], frame.tensors[buffer], block, frame.step)


def _keep(instruction: Keep, frame: Frame) -> None:
    frame.kept[frame.index] = frame.results.pop(instruction.buffer)


def _normalize(instruction: Normalize, frame: Frame) -> None:
    buffer = instruction.buffer
    frame.unit = power_of_two_above(frame.tensors[buffer])
    frame.tensors[buffer] = frame.tensors[buffer] / frame.unit


def _scale(instruction: Scale, frame: Frame) -> None:
    assert frame.scale is not None
    buffer, factor = frame.tensors[instruction.buffer], frame.scale
    factor = factor if frame.unit is None else factor * frame.unit
    rows_elsewhere.scale_(buffer, factor) if rows_elsewhere.is_elsewhere(buffer) else buffer.mul_(factor)


def _round(instruction: Round, frame: Frame) -> None:
    buffer = instruction.buffer
    frame.tensors[buffer] = frame.runner.rounded(buffer, frame.tensors.pop(buffer), frame.function)


# ---- rows on several devices


def _all_gather(instruction: AllGather, frame: Frame) -> None:
    own, rows = _exchanged(instruction.buffer, frame)
    own.fill(rows, own.own(rows))


def _reduce_scatter(instruction: ReduceScatter, frame: Frame) -> None:
    own, rows = _exchanged(instruction.buffer, frame)
    if instruction.others:
        own.zero(rows)
    own.write(rows, own.sum(rows))


def _receive(instruction: Receive, frame: Frame) -> None:
    _with_neighbour(instruction.buffer, frame, OwnRows.receive, BufferKind.STATE_GRADIENT)


def _send(instruction: Send, frame: Frame) -> None:
    _with_neighbour(instruction.buffer, frame, OwnRows.send, BufferKind.STATE)


def _with_neighbour(
    buffer: Buffer, frame: Frame, exchange: Callable[[OwnRows, Tensor, int], None], kind: BufferKind
) -> None:
    """Send or receive what is at a border: that with the device behind for this kind, else the one before."""
    own, behind = frame.step.own, buffer.kind is kind
    assert own is not None
    rank = own.rank + (1 if behind else -1)
    if 0 <= rank < own.devices:
        border = own.begin_of(rank) if behind else own.begin
        exchange(own, _at_border(buffer, frame, border, last=behind), rank)


def _exchanged(buffer: Buffer, frame: Frame) -> tuple[OwnRows, Tensor]:
    """Whose rows are whose, and the state with its rows in front."""
    assert frame.step.own is not None
    return frame.step.own, frame.tensors[buffer].movedim(buffer.dim, 0)


def _at_border(buffer: Buffer, frame: Frame, border: int, last: bool) -> Tensor:
    """What a device reads of a state that others have filled, as a view: the rows before a border.

    Of a recurrence: the state before the first chunk of a device, or behind its last one.
    """
    assert buffer.node is not None
    tensor = frame.tensors[buffer]
    if buffer.by_chunk:
        return tensor[-1 if last else 0]
    before = frame.runner.programs.states[buffer.node].before
    rows = tensor.movedim(buffer.dim, 0)[:border]
    return rows if before is None else rows[max(0, len(rows) - before) :]


def power_of_two_above(coefficients: Tensor) -> Tensor:
    """The power of two just above the greatest coefficient.

    NOTE [float16]: the sweep runs before anybody scales the loss, and the coefficients of a mean over many
    tokens are so small that float16 gradients would vanish. So they are divided by this number, which is
    exact, and the finished gradients are multiplied by it together with the scale of the loss.
    Not by a smaller one, to leave room for gradients greater than the coefficients: with 2**-8, a quarter of
    the gradient of a word that is no label would be rounding (its probability is some 2e-5 in a vocabulary of
    50,000). Logits that are multiplied by more than 65504 overflow here where eager's mean may not, and the
    self-check then has the model run unstreamed.
    """
    greatest = coefficients.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(greatest)))


EXECUTE: Mapping[type, Callable[[Any, Frame], None]] = {
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
