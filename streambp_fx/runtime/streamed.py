"""A streamed segment: chunk by chunk forwards, and chunk by chunk in reverse backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..passes.batch import Samples
from ..passes.chunk import narrow
from ..passes.gradients import reached
from ..passes.inputs import Extent
from ..passes.ir import Axis, Facts, PassError, Reach, Segment, shape_of, sum_dtype, tensors_of
from ..passes.lower import Lowered
from ..passes.segment import row_axis
from ..passes.vjp import SegmentPrograms
from .blocks import Block, Part, Step, counts
from .common import compile_error, split_rows
from .rounding import is_added, rounded


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
        self, node: Node, step: Step, like: Tensor, zero: bool = False, wide: bool = False
    ) -> Tensor:
        """A buffer for a value; `wide`: for sums of it over chunks."""
        shape = [step.resolve(s) for s in shape_of(node)]
        dtype = tensors_of(node)[0].dtype
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=sum_dtype(dtype) if wide else dtype, device=like.device)

    def accumulators(self, constants: list[Tensor]) -> list[Tensor]:
        """Zeros for the gradients of those of the segment's constants that have one."""
        by_node = dict(zip(self.segment.constants, constants, strict=True))
        given = [by_node[n] for n in self.diff_constants]
        wide = self.programs.wide
        return [torch.zeros_like(t, dtype=sum_dtype(t.dtype) if wide else t.dtype) for t in given]

    def finished(self, accumulators: list[Tensor], function: Any) -> list[Tensor]:
        """The gradients in the dtypes of what they are gradients of; the list is emptied.

        Args:
            function: the autograd node that returns them, whose inputs are `rows`, then `constants`.
        """
        inputs, found = (*self.segment.rows, *self.segment.constants), []
        for node in self.diff_constants:
            alone = node not in self.constants_before and is_added(function, inputs.index(node))
            found.append(rounded(accumulators.pop(0), tensors_of(node)[0].dtype, in_place=alone))
        return found

    @cached_property
    def constants_before(self) -> frozenset[Node]:
        """Constants of earlier segments: their gradients wait for what those will add."""
        return frozenset(n for s in self.facts.segments[: self.segment.index] for n in s.constants)

    def _unwritten(self, node: Node, step: Step, like: Tensor) -> Tensor:
        """A stand-in for a value that nobody reads: its shape, without its memory."""
        shape = [step.resolve(s) for s in shape_of(node)]
        return torch.empty((), dtype=tensors_of(node)[0].dtype, device=like.device).expand(shape)

    def is_full(self, step: Step) -> bool:
        return self.segment.reach is Reach.FULL or any(m in step.full for m in self.masks)

    def extents(self, step: Step) -> list[Extent]:
        """The chunks of this segment in a step."""
        rows = step.chunk if self.segment.mixings else step.loss_chunk
        return self.extents_of(step.total, rows, self.is_full(step))

    def extents_of(self, tokens: int, chunk: int, full: bool | None = None) -> list[Extent]:
        """The chunks for a sequence length. A window bounds how far back a chunk's columns begin."""
        full = self.segment.reach is Reach.FULL if full is None else full
        result = []
        total = tokens - self.segment.removed
        for start, rows in split_rows(total, chunk):
            low = 0 if self.segment.mixings else start
            if self.segment.window is not None and not full:
                low = max(0, start - int(self.segment.window) + 1)
            result.append(Extent(rows, start - low, low, total, full))
        return result

    def extent_of(self, kind: str, extent: Extent) -> Extent:
        """What a program of a kind reads for a chunk: state rows alone are made of their own rows."""
        alone = kind == "state_joint" or (kind == "states" and not self.segment.chained)
        return extent.own() if alone else extent

    @cached_property
    def samples(self) -> Samples | str:
        """Where the samples are, or why they are not known to be independent."""
        found = self.programs.samples
        if isinstance(found, str):
            return found
        places = {self.twins[n]: place for n, place in found.places.items()}
        return Samples(found.size, places)

    def blocks(self, step: Step) -> list[Block]:
        """The chunks of this segment in a step, each with the samples that it is run for."""
        return [Block(e, part) for e in self.extents(step) for part in step.parts(e.start)]

    def counts(self, coefficients: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Which samples have a part in the loss in each chunk of a loss head, and how far, see `counts`."""
        node = self.segment.outputs[0]
        (dim, axis), samples = self.axis(node), self.samples
        place = samples.places.get(node) if isinstance(samples, Samples) else None
        own = (place, step.resolve(place.inner)) if place is not None else None
        return counts(coefficients, dim, step.resolve(axis.inner), own, self.extents(step))

    def part_of(self, node: Node, value: Tensor, part: Part | None, step: Step) -> Tensor:
        """Some samples of a value, as a view."""
        if part is None:
            return value
        assert isinstance(self.samples, Samples)
        place = self.samples.places.get(node)
        return (
            value if place is None else place.narrow(value, part.first, part.count, step.resolve(place.inner))
        )

    def _parts_of(self, given: Values, part: Part | None, step: Step) -> Values:
        if part is None:
            return given
        own = self.segment
        of = lambda nodes, values: [  # noqa: E731
            self.part_of(n, v, part, step) for n, v in zip(nodes, values, strict=bool(values))
        ]
        states = [self.twins[s] for s in self.programs.states]
        return dataclasses.replace(
            given,
            rows=of(own.rows, given.rows),
            constants=of(own.constants, given.constants),
            whole=of(own.whole, given.whole),
            states=of(states, given.states),
            gradients=of(states, given.gradients),
            cotangents=of(self.diff_outputs, given.cotangents),
        )

    # ---- calls

    def call(self, kind: str, block: Block, step: Step, index: int, given: Values) -> list[Any]:
        """Run a program on one chunk."""
        extent = block.extent
        given, step = self._parts_of(given, block.part, step), step.of(block.part)
        seed = step.seed + ((self.segment.index << 20) + index << 12)
        args: list[Any] = [extent.rows, extent.prefix, extent.low, extent.total, seed]
        args += [step.sizes[s] for s in self.programs.slots(kind).symbols]
        args += [self.rows_of(n, v, extent, step) for n, v in zip(self.segment.rows, given.rows, strict=True)]
        args += given.constants
        args += given.whole
        columns = extent.total if extent.full else extent.prefix + extent.rows
        states = list(self.programs.states.values())
        args += [b.narrow(s.dim, extent.low, columns) for s, b in zip(states, given.states, strict=True)]
        if kind in ("joint", "loss", "state_joint"):
            args += [
                b.narrow(s.dim, extent.low, columns) for s, b in zip(states, given.gradients, strict=True)
            ]
        if kind in ("joint", "loss"):
            pairs = zip(self.diff_outputs, given.cotangents, strict=True)
            args += [self.rows_of(n, v, extent, step) for n, v in pairs]
        if given.kept and self.programs.reads_kept(kind):
            args += given.kept[index]
        if kind in ("joint", "loss", "state_joint"):
            args += given.accumulators
        program = self.program(kind, extent, step, args)
        if program.workspace is not None:
            args.append(given.workspace_of(program.workspace))
        return program.run(*args)

    def program(self, kind: str, extent: Extent, step: Step, args: list[Any]) -> Lowered:
        """The program for a chunk; only the numbers at the front of `args` are looked at."""
        plain = frozenset(m for m, own in self.model_masks.items() if own in step.plain)
        try:
            return self.programs.get(kind, plain, extent, args)
        except PassError as error:
            raise compile_error(error) from error

    def prepare_backward(self, step: Step) -> None:
        """Make the programs of the backward in the forward, where a failure leaves nothing half done."""
        for block in self.blocks(step):
            extent, known = block.extent, step.of(block.part).sizes
            sizes = [extent.rows, extent.prefix, extent.low, extent.total, step.seed]
            kinds = ["joint", *(("state_joint",) if extent.full and self.programs.states else ())]
            for kind in kinds:
                numbers = [known[s] for s in self.programs.slots(kind).symbols]
                self.program(kind, self.extent_of(kind, extent), step, [*sizes, *numbers])

    def rows_of(self, node: Node, value: Tensor, extent: Extent, step: Step) -> Tensor:
        """The rows of a chunk as a view of the whole value."""
        dim, axis = self.axis(node)
        return narrow(value, dim, axis, extent.start, extent.rows, extent.total, step.resolve)

    def view(self, node: Node, value: Tensor, block: Block, step: Step) -> Tensor:
        """The rows of a block, as a view of the whole value; rows that are merged with samples as parts."""
        value, step = self.part_of(node, value, block.part, step), step.of(block.part)
        dim, axis = self.axis(node)
        if not axis.simple:
            sizes = (step.resolve(axis.outer), block.extent.total, step.resolve(axis.inner))
            value, dim = value.unflatten(dim, sizes), dim + 1
        return value.narrow(dim, block.extent.start, block.extent.rows)

    def rows_behind(self, limits: list[int], node: Node, value: Tensor, step: Step) -> Iterator[Tensor]:
        """The rows of an output that do not count, of one sample (or all together) after the other."""
        total = step.total - self.segment.removed
        for k, end in enumerate(limits):
            if end < total:
                part = Part(k, 1) if len(limits) > 1 else None
                yield self.view(node, value, Block(Extent(total - end, 0, end, total), part), step)

    def axis(self, node: Node) -> tuple[int, Axis]:
        found = row_axis(self.facts, node)
        assert found is not None
        return found

    def write(
        self, node: Node, buffer: Tensor, block: Block, step: Step, value: Tensor, add: bool = False
    ) -> None:
        """Store a chunk's rows of an output, or add to them."""
        rows = self.view(node, buffer, block, step)
        value = value.reshape(rows.shape)
        rows.add_(value) if add else rows.copy_(value)

    def write_each(
        self,
        nodes: Iterable[Node],
        buffers: Iterable[Tensor],
        block: Block,
        step: Step,
        values: Iterable[Tensor],
        add: bool = False,
    ) -> None:
        """The same for several; when it returns, nothing here holds a value."""
        for node, buffer, value in zip(nodes, buffers, values, strict=True):
            self.write(node, buffer, block, step, value, add)

    def can_overwrite(self) -> bool:
        """True if the gradient of the one streamed input has the form of that of the one output."""
        if len(self.diff_rows) != 1 or len(self.diff_outputs) != 1:
            return False
        row, output = self.diff_rows[0], self.diff_outputs[0]
        if output in self.facts.outputs:
            return False  # somebody may hold its gradient
        same = tensors_of(row)[0].dtype == tensors_of(output)[0].dtype
        return same and shape_of(row) == shape_of(output) and self.axis(row) == self.axis(output)

    # ---- forward and backward

    def new_states(self, step: Step, like: Tensor, gradients: bool = False) -> list[Tensor]:
        wide = gradients and self.programs.wide
        return [self.allocate(s.node, step, like, gradients, wide) for s in self.programs.states.values()]

    def forward(self, step: Step, given: Values, like: Tensor, unread: bool = False) -> list[Tensor]:
        if unread:
            return [self._unwritten(n, step, like) for n in self.segment.outputs]
        some = step.needed is not None
        outputs = [self.allocate(n, step, like, zero=some) for n in self.segment.outputs]
        given.states = self.new_states(step, like)
        blocks = self.blocks(step)
        if self.is_full(step):
            self.fill_states(step, given, blocks)
        for index, block in enumerate(blocks):
            values = self.call("forward", block, step, index, given)
            self.write_each(self.segment.outputs, outputs, block, step, values[: len(outputs)])
            if step.training:
                given.kept.append(values[len(outputs) :])
            del values
        given.states = []
        return outputs

    def fill_states(self, step: Step, given: Values, blocks: list[Block]) -> None:
        if self.programs.states:
            for index, block in enumerate(blocks):
                self.call("states", block if self.segment.chained else block.own(), step, index, given)

    def backward(self, step: Step, given: Values, like: Tensor, reuse: bool) -> list[Tensor]:
        """Gradients of the streamed inputs; those of the parameters are added to `given.accumulators`.

        Args:
            reuse: the first cotangent is a buffer of ours, to be overwritten by the first gradient.
        """
        blocks, some = self.blocks(step), step.needed is not None
        full = self.is_full(step)
        given.states = self.new_states(step, like)
        self.fill_states(step, given, blocks)
        given.gradients = self.new_states(step, like, gradients=True)
        gradients = [self.allocate(n, step, like, zero=some) for n in self.diff_rows[reuse:]]
        if reuse:  # where no block is run its rows are zero: nothing comes from there
            gradients.insert(0, given.cotangents[0])
        for index, block in reversed(list(enumerate(blocks))):
            values = self.call("joint", block, step, index, given)
            self.write_each(self.diff_rows, gradients, block, step, values)
            del values
        if full and self.programs.states:
            self._finish_states(step, given, blocks, gradients)
        return gradients

    def _finish_states(self, step: Step, given: Values, blocks: list[Block], gradients: list[Tensor]) -> None:
        """Not causal: the state gradient is complete only now; differentiate the rows it came from."""
        for index, block in enumerate(blocks):
            values = self.call("state_joint", block.own(), step, index, given)
            self.write_each(self.diff_rows, gradients, block, step, values, add=True)
            del values


@dataclass
class Values:
    """Tensors of a segment during one sweep."""

    rows: list[Tensor]
    constants: list[Tensor]
    whole: list[Tensor]
    states: list[Tensor] = ()  # type: ignore[assignment]
    gradients: list[Tensor] = ()  # type: ignore[assignment]
    cotangents: list[Tensor] = ()  # type: ignore[assignment]
    accumulators: list[Tensor] = ()  # type: ignore[assignment]
    kept: list[list[Tensor]] = field(default_factory=list)  # of each chunk, see `passes.policy`
    workspace: dict[torch.dtype, Tensor] = field(default_factory=dict)  # see `passes.workspace`

    def workspace_of(self, dtype: torch.dtype) -> Tensor:
        """A tensor without elements, with the memory that the last chunk's had."""
        return self.workspace.setdefault(dtype, torch.empty(0, dtype=dtype)).resize_(0)
