"""A streamed segment of one model: its programs, its procedures, and the rows of its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.graph.facts import (
    Axis,
    Facts,
    Mask,
    PassError,
    Reach,
    Segment,
    shape_of,
    sum_dtype,
    tensors_of,
)
from ...passes.s2_prove.gradient_edges import reached
from ...passes.s2_prove.independent_samples import Samples
from ...passes.s3_cut.alive_bytes import row_axis
from ...passes.s4_trace.carried_state import state_of_recurrence
from ...passes.s4_trace.evaluation import narrow
from ...passes.s4_trace.program_inputs import Extent
from ...passes.s5_lower.lower import Lowered
from ...passes.s5_lower.programs import SegmentPrograms
from ...passes.step.instructions import BY_COLUMNS, BY_ROWS, Buffer, BufferKind
from ...passes.step.row_chunks import ChunkSize, chunk_size, rows_before, split_rows
from ...passes.step.saving import Price
from . import rows_elsewhere
from .column_blocks import can_take_turns
from .failures import compile_error
from .own_rows import RowsOfValue
from .round_sums import is_added, rounded
from .step_blocks import RowBlock, SampleRange, StepData, counts


class Held(Protocol):
    """What is held while a procedure runs, see `interpreter.Frame`."""

    tensors: dict[Buffer, Tensor]
    kept: dict[int, list[Tensor]]
    passing: frozenset[Buffer]
    columns: dict[Buffer, tuple[int, int]]
    own_states: set[Buffer]

    @property
    def device(self) -> torch.device:
        """That of the programs."""

    def workspace_of(self, dtype: torch.dtype) -> Tensor:
        """A tensor of shape (0,) in this dtype, with the memory that the last chunk's had."""


class SegmentRunner:
    """One segment of one model: its programs (shared with identical segments) and its own values.

    Args:
        facts: facts of the graph.
        segment: the segment.
        programs: programs traced from this segment or from one identical to it.
    """

    def __init__(self, facts: Facts, segment: Segment, programs: SegmentPrograms) -> None:
        self.facts, self.segment, self.programs = facts, segment, programs
        self.model = programs.segment
        self.needs_grad = facts.trains(segment)
        twins = dict(zip(self.model.nodes, segment.nodes, strict=True))
        self.twins = twins
        for own in ("rows", "constants", "whole"):
            self.twins.update(zip(getattr(self.model, own), getattr(segment, own), strict=True))
        self.masks = [m.mask for m in segment.mixings if m.mask is not None]
        self.model_masks = {
            m.mask: twin.mask
            for m, twin in zip(self.model.mixings, segment.mixings, strict=True)
            if m.mask is not None
        }
        self.diff_outputs = [twins[n] for n in programs.diff_outputs]
        self.diff_rows = [segment.rows[self.model.rows.index(n)] for n in programs.diff_rows]
        self.diff_constants = [
            segment.constants[self.model.constants.index(n)] for n in programs.diff_constants
        ]

    def reached_from(self, outputs: Iterable[Node]) -> set[Node]:
        """Inputs of the segment that a gradient of these outputs comes to; eager leaves others None."""
        ends = {*self.segment.rows, *self.segment.constants}
        return reached(self.facts, [n for n in outputs if n in self.facts.needs_grad], ends) & ends

    # ---- sizes

    def allocate(
        self,
        node: Node,
        step: StepData,
        like: Tensor,
        zero: bool = False,
        wide: bool = False,
        own: bool = False,
    ) -> Tensor:
        """A buffer for a value, in its shape for this step and its dtype.

        Args:
            like: a tensor on the device of the buffer.
            zero: it begins with zeros.
            wide: it is for sums of the value over chunks, which may have a wider dtype.
            own: it is for the rows of this device alone.
        """
        shape = self._shape(node, step, own)
        dtype = tensors_of(node)[0].dtype
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=sum_dtype(dtype) if wide else dtype, device=like.device)

    def allocate_elsewhere(self, node: Node, step: StepData, place: str, zero: bool) -> Tensor:
        """A buffer that does not lie on the device, for a value, in its shape for this step and its dtype.

        Raises:
            OffloadError: there is no room.
        """
        shape, dtype = self._shape(node, step, own=True), tensors_of(node)[0].dtype
        return rows_elsewhere.empty(shape, dtype, place, zero)

    def _shape(self, node: Node, step: StepData, own: bool) -> list[int]:
        shape = [step.resolve(s) for s in shape_of(node)]
        if own and step.own is not None:
            lies = self.lies(node, step)
            shape[lies.dim] = lies.entries
        return shape

    def columns(self, buffer: Buffer, count: int, step: StepData, like: Tensor) -> Tensor:
        """Zeros for so many columns of a state gradient, in the dtype of the sum."""
        assert buffer.node is not None
        shape, dtype = self._shape(buffer.node, step, own=False), tensors_of(buffer.node)[0].dtype
        shape[buffer.dim] = count
        return torch.zeros(shape, dtype=self.sum_dtype(buffer, dtype), device=like.device)

    def lies(self, node: Node, step: StepData) -> RowsOfValue:
        """How the rows of a value lie on this device, of a step whose rows lie on several."""
        assert step.own is not None
        return RowsOfValue.of(step.own, *self.axis(node), step.resolve)

    def states_of_recurrence(self, buffer: Buffer, chunks: int, step: StepData, like: Tensor) -> Tensor:
        """Zeros for the state of a recurrence before each of so many chunks, and after the last.

        Returns:
            (chunks + 1, ...), in the dtype of the state or, for wide sums, of its sum.
        """
        assert buffer.node is not None
        sizes, dtype = state_of_recurrence(buffer.node, buffer.wide)
        shape = [chunks + 1, *map(step.resolve, sizes)]
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def sum_dtype(self, buffer: Buffer, dtype: torch.dtype) -> torch.dtype:
        """Of a sum over chunks of gradients in a dtype."""
        return sum_dtype(dtype) if buffer.wide else dtype

    def rounded(self, buffer: Buffer, total: Tensor, function: Any) -> Tensor:
        """The gradient of a constant in its own dtype; nobody reads the sum afterwards.

        Args:
            function: the autograd node that returns it, whose inputs are `rows`, then `constants`.
        """
        assert buffer.node is not None
        node, inputs = self.twins[buffer.node], (*self.segment.rows, *self.segment.constants)
        alone = node not in self.constants_before and is_added(function, inputs.index(node))
        return rounded(total, tensors_of(node)[0].dtype, in_place=alone)

    @cached_property
    def constants_before(self) -> frozenset[Node]:
        """Constants of earlier segments: their gradients wait for what those will add."""
        return frozenset(n for s in self.facts.segments[: self.segment.index] for n in s.constants)

    def unwritten(self, node: Node, step: StepData, like: Tensor) -> Tensor:
        """A stand-in for a value that nobody reads: its shape, without its memory."""
        shape = self._shape(node, step, own=True)
        return torch.empty((), dtype=tensors_of(node)[0].dtype, device=like.device).expand(shape)

    def is_full(self, step: StepData) -> bool:
        """True if rows may read all rows in this step."""
        return self.segment.reach is Reach.FULL or any(m in step.full for m in self.masks)

    def extents(self, step: StepData, size: ChunkSize | None = None) -> list[Extent]:
        """The chunks of this segment in a step; None: of the size that they have where it runs by itself."""
        rows = (size or chunk_size(self.segment)).of(step)
        total = step.total - self.segment.removed
        spans = None if step.own is None else step.own.spans(total)
        count = step.own.chunks_of_piece(rows) if step.own is not None and self.is_by_blocks(step) else 0
        return self.extents_of(step.total, rows, self.is_full(step), spans, count)

    def is_by_blocks(self, step: StepData) -> bool:
        """True if columns of other devices come block by block, see NOTE [columns in blocks]."""
        return self.segment.index in step.by_blocks

    def may_read_by_blocks(self, step: StepData) -> bool:
        """True if its programs can read the columns of other devices block by block in this step.

        Raises:
            CompileError: a program cannot be traced.
        """
        own, chunk = step.own, step.chunk
        if own is None or own.in_turn or self.segment.removed or self.is_full(step):
            return False
        if not can_take_turns(own.tokens, own.devices, chunk):
            return False
        spans, count = own.spans(step.total), own.chunks_of_piece(chunk)
        plain = self._plain(step)
        extents = map(own.of_others, self.extents_of(step.total, chunk, False, spans, count))
        for extent in {e.pattern: e for e in extents}.values():
            numbers = self.numbers(extent, step.seed, step)
            try:
                if not self.programs.read_by_blocks(plain, extent, numbers):
                    return False
            except PassError as error:
                raise compile_error(error) from error
        return True

    def extents_of(
        self,
        tokens: int,
        chunk: int,
        full: bool | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        count: int = 0,
    ) -> list[Extent]:
        """The chunks for a sequence length. A window bounds how far back a chunk's columns begin.

        Args:
            spans: first row and end of the pieces that are run; None: all rows are.
            count: chunks of each piece; 0: as many as it needs.
        """
        full = self.segment.reach is Reach.FULL if full is None else full
        before, result = rows_before(self.segment, full), []
        total = tokens - self.segment.removed
        pieces = [(0, total)] if spans is None else spans
        cut = ((first, split_rows(end - first, chunk, count=count)) for first, end in pieces)
        for start, rows in ((first + k, rows) for first, own in cut for k, rows in own):
            low = 0 if before is None else max(0, start - before)
            result.append(Extent(rows, start - low, low, total, full))
        return result

    @cached_property
    def samples(self) -> Samples | str:
        """Where the samples are, or why they are not known to be independent."""
        found = self.programs.samples
        if isinstance(found, str):
            return found
        places = {self.twins[n]: place for n, place in found.places.items()}
        return Samples(found.size, places)

    def blocks(self, step: StepData, size: ChunkSize | None = None) -> list[RowBlock]:
        """The chunks of this segment in a step, as of `extents`, each with the samples that it is run for."""
        return [RowBlock(e, part) for e in self.extents(step, size) for part in step.parts(e.start)]

    def counts(self, coefficients: Tensor, step: StepData) -> tuple[Tensor, Tensor]:
        """Which samples have a part in the loss in each chunk of a loss head, and how far, see `counts`.

        Args:
            coefficients: of the loss in the rows of the head, in the shape of the head's output.
        """
        node = self.segment.outputs[0]
        (dim, axis), samples = self.axis(node), self.samples
        place = samples.places.get(node) if isinstance(samples, Samples) else None
        own = (place, step.resolve(place.inner)) if place is not None else None
        return counts(coefficients, dim, step.resolve(axis.inner), own, self.extents(step))

    def _samples_of(self, node: Node, value: Tensor, part: SampleRange | None, step: StepData) -> Tensor:
        """Some samples of a tensor, as a view with fewer entries in the dim of the samples.

        A sum has samples where the constant has them of which it is the gradient (a value for each sample).

        Args:
            node: that the tensor is the value or the gradient of.
            part: which samples; None: all of them.
        """
        if part is None:
            return value
        assert isinstance(self.samples, Samples)
        place = self.samples.places.get(node)
        inner = 1 if place is None else step.resolve(place.inner)
        return value if place is None else place.narrow(value, part.first, part.count, inner)

    # ---- programs

    def call(
        self,
        kind: str,
        block: RowBlock,
        step: StepData,
        index: int,
        frame: Held,
        inputs: Iterable[Buffer],
        price: Price | None = None,
    ) -> list[Any]:
        """Run a program on one chunk.

        Args:
            kind: of the program.
            index: of the chunk.
            frame: what is held.
            inputs: what of that goes into the program, in order.
            price: at which values of the chunk are saved, or were.
        """
        extent, own = block.extent, step.of(block.part)
        seed = step.seed + ((self.segment.index << 20) + step.first_index + index << 12)
        args = self.numbers(extent, seed, own)
        for buffer in inputs:
            if buffer.kind is BufferKind.KEPT:
                args += frame.kept[index]
            elif buffer in frame.passing:
                args.append(frame.tensors[buffer])
            else:
                assert buffer.node is not None
                node = self.twins[buffer.node]
                value = self._samples_of(node, frame.tensors[buffer], block.part, step)
                if buffer in frame.own_states:
                    given = self.own_columns(buffer, value, extent, own)
                elif buffer in frame.columns:  # no others are held
                    given = value
                else:
                    given = self.input(buffer, value, extent, own, index)
                if buffer.kind in BY_ROWS and given.device != frame.device:
                    given = given.to(frame.device, non_blocking=True)
                args.append(given)
        program = self.program(kind, extent, own, args, price)
        if program.workspace is not None:
            args.append(frame.workspace_of(program.workspace))
        return program.run(*args)

    def numbers(self, extent: Extent, seed: int, step: StepData) -> list[Any]:
        """The numbers that a program is given for a chunk."""
        return [*extent.sizes, seed, *(step.sizes[s] for s in self.programs.symbols)]

    def input(self, buffer: Buffer, value: Tensor, extent: Extent, step: StepData, index: int = 0) -> Tensor:
        """What of a tensor a program is given for a chunk, the one with this index, as a view.

        Only the dim of the sequence has another size: the rows of the chunk or its columns, as the kind of
        the buffer says. Values without the sequence are handed over as they are.
        """
        assert buffer.node is not None
        if buffer.by_chunk:
            return value.narrow(0, index, 2)
        if buffer.kind in BY_ROWS:
            return self.rows_of(self.twins[buffer.node], value, extent, step)
        if buffer.kind in BY_COLUMNS:
            return value.narrow(buffer.dim, extent.low, extent.columns)
        return value

    def own_columns(self, buffer: Buffer, value: Tensor, extent: Extent, step: StepData) -> Tensor:
        """The columns of a chunk: a view of a state, in its dtype, that has the rows of this device alone."""
        assert step.own is not None
        return value.narrow(buffer.dim, step.own.place(extent.start) - extent.prefix, extent.columns)

    def program(
        self, kind: str, extent: Extent, step: StepData, args: list[Any], price: Price | None = None
    ) -> Lowered:
        """The program for a chunk; only the numbers at the front of `args` are looked at."""
        try:
            return self.programs.get(kind, self._plain(step), extent, args, price)
        except PassError as error:
            raise compile_error(error) from error

    def _plain(self, step: StepData) -> frozenset[Mask]:
        """Masks that hide nothing but later rows in a step, by the names of the programs."""
        return frozenset(m for m, own in self.model_masks.items() if own in step.plain)

    def rows_of(self, node: Node, value: Tensor, extent: Extent, step: StepData) -> Tensor:
        """The rows of a chunk: a view of the whole value with fewer entries in the dim of the sequence."""
        dim, axis = self.axis(node)
        start, total = self._place(extent, step)
        return narrow(value, dim, axis, start, extent.rows, total, step.resolve)

    def _place(self, extent: Extent, step: StepData) -> tuple[int, int]:
        """Where the rows of a chunk begin among those that are held, and how many are."""
        if step.own is None:
            return extent.start, extent.total
        return step.own.place(extent.start), step.own.count(extent.total)

    def view(self, node: Node, value: Tensor, block: RowBlock, step: StepData) -> Tensor:
        """The rows of a block, as a view of the whole value with fewer entries in the dim of the sequence.

        Where one dim holds rows merged with others, the view has three dims in its place: outer, rows, inner.
        """
        value, step = self._samples_of(node, value, block.part, step), step.of(block.part)
        dim, axis = self.axis(node)
        start, total = self._place(block.extent, step)
        if not axis.simple:
            sizes = (step.resolve(axis.outer), total, step.resolve(axis.inner))
            value, dim = value.unflatten(dim, sizes), dim + 1
        return value.narrow(dim, start, block.extent.rows)

    def rows_behind(self, limits: list[int], node: Node, value: Tensor, step: StepData) -> Iterator[Tensor]:
        """The rows of an output that do not count, of one sample (or all together) after the other.

        Args:
            limits: how many rows count, for each sample or for all.
            value: the output, in its shape and dtype; what is yielded are views as of `view`.
        """
        total = step.total - self.segment.removed
        for k, end in enumerate(limits):
            if end < total:
                part = SampleRange(k, 1) if len(limits) > 1 else None
                yield self.view(node, value, RowBlock(Extent(total - end, 0, end, total), part), step)

    def axis(self, node: Node) -> tuple[int, Axis]:
        """The index of the dim that holds the rows of a value, and its axis."""
        found = row_axis(self.facts, node)
        assert found is not None
        return found
