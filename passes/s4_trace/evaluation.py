"""The evaluation of a segment's nodes on one chunk, op by op: sizes by role, and parts of whole values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..graph.facts import Axis, Kind, PassError, Role, shape_of, tensors_of
from ..graph.symbols import evaluate, evaluate_size
from ..masks.analysis import materialize
from ..rules import places
from ..rules.op_sets import ALIGNED
from .carried_state import Ranges, Size, StateReader, edges
from .chunk_program import ChunkProgram
from .foreign_ops import call_foreign, is_foreign
from .prefix_attention import dropout_mask
from .provenance import Origins


class Evaluation:
    """One run of a chunk program; its parameters are those of `evaluated`.

    Attributes:
        values: what is evaluated, by node and role.
        blocks: parts of sequence x sequence values, by node and axes; each is built once.
    """

    def __init__(
        self,
        program: ChunkProgram,
        bindings: dict[Node, Any],
        ranges: Ranges,
        reader: StateReader,
        seed: Size,
    ) -> None:
        self.program, self.facts, self.ranges, self.reader = program, program.facts, ranges, reader
        self.seed = seed
        self.values: dict[tuple[Node, Role], Any] = {(n, Role.ROW): v for n, v in bindings.items()}
        self.bound = bindings
        self.blocks: dict[tuple, Tensor] = {}
        self.at_places = False  # the node that is evaluated has no rows: see NOTE [places]

    def targets(self) -> list[Tensor]:
        """The targets, in the dtypes and, but for the rows, the shapes of the graph."""
        origins = self.program.origins
        assert origins is not None
        for node, role in self.program.needed:
            if role is Role.COLUMN and node in self.program.states:
                own = self.values[node, Role.ROW]
                with origins.of(node):
                    self.values[node, role] = self.reader.columns(self.program.states[node], own)
            else:
                with origins.of(node):
                    self.values[node, role] = self._evaluate(node, role)
            origins.follow(self.values[node, role], node)
        return [self.values[n, Role.ROW] for n in self.program.targets]

    # ---- sizes

    def resolve(self, expr: sympy.Expr) -> Size:
        """A size that does not depend on the chunk (the sequence symbol means its full length)."""
        return evaluate(expr, {s: self.bound[s] for s in expr.free_symbols})

    def length(self, axis: Axis, role: Role) -> Size:
        """Entries of a dim that carries the sequence: the columns of the chunk, or its rows."""
        column = role is Role.COLUMN or axis.role is Role.COLUMN
        return self.ranges.columns if column else self.ranges.rows

    def local_shape(self, node: Node, role: Role) -> list[Size]:
        """Sizes of a node's value on this chunk."""
        layout = self.facts.layouts[node]
        assert layout is not None
        return [
            self.resolve(size) if axis is None else axis.size(self.length(axis, role), self.resolve)
            for size, axis in zip(shape_of(node), layout, strict=True)
        ]

    # ---- operands

    def operand(self, node: Node, role: Role, axes: tuple[Axis | None, ...] | None = None) -> Any:
        """Value of an operand; `axes` are those of the result's dims that it aligns with."""
        if (node, role) in self.values and self.facts.kinds[node] is Kind.STREAM:
            return self.values[node, role]
        kind = self.facts.kinds[node]
        if kind is Kind.SIZE:
            return evaluate_size(node, self.resolve)
        if kind is Kind.WHOLE:
            own = axes if axes is not None else self.facts.layouts.get(node)
            return self.slice_whole(node, own or (None,) * self.bound[node].dim(), role)
        if kind is Kind.SQUARE:
            if axes is None and self.at_places:
                axes = places(self.facts, node)
            assert axes is not None, f"{node} needs the axes of its reader"
            return self.block(node, axes)
        if (node, Role.ROW) not in self.values:
            self.values[node, Role.ROW] = self.constant(node)
        return self.values[node, Role.ROW]

    def constant(self, node: Node) -> Any:
        """A value that no row is in: the data that it is made of is all of the data, not a chunk's."""

        def value(operand: Node) -> Any:
            whole = self.facts.kinds[operand] is Kind.WHOLE
            return self.bound[operand] if whole else self.operand(operand, Role.ROW)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    def slice_whole(self, node: Node, axes: tuple[Axis | None, ...], role: Role) -> Tensor:
        """The rows or columns of a whole value that belong to the chunk, in its dtype and its rank.

        `axes` says for each of its dims which axis of the sequence it carries, if any.
        """
        value = self.bound[node]
        for dim, (axis, size) in enumerate(zip(axes, shape_of(node), strict=True)):
            if axis is not None and size != 1:
                wanted = Role.COLUMN if role is Role.COLUMN or axis.role is Role.COLUMN else Role.ROW
                fixed = not size.free_symbols  # a length that was made a constant
                total = -1 if fixed else self.ranges.total
                value = narrow(value, dim, axis, *self.ranges.interval(wanted), total, self.resolve)
        return value

    def block(self, node: Node, axes: tuple[Axis | None, ...]) -> Tensor:
        """Rows and columns of a sequence x sequence value, built for this chunk, in its dtype and its rank.

        `axes` says for each of its dims which axis of the sequence it carries, if any.
        """
        key = (node, axes)
        if key not in self.blocks:
            dims: list[tuple | None] = []
            for axis, size in zip(axes, shape_of(node), strict=True):
                if axis is None or size == 1:
                    dims.append(None)
                else:
                    first, length = self.ranges.interval(axis.role)
                    dims.append((first, first + length))
            self.blocks[key] = materialize(node, tuple(dims), self.fetch, self.is_whole)
        return self.blocks[key]

    def is_whole(self, node: Node) -> bool:
        """True for a value that depends on no parameter, and is computed once for the whole sequence."""
        return self.facts.kinds.get(node) is Kind.WHOLE

    def fetch(self, node: Node) -> Any:
        """A value without gradient, whole (a size: as an integer)."""
        if self.facts.kinds[node] is Kind.SIZE:
            return evaluate_size(node, self.resolve)
        return self.bound[node]

    # ---- nodes

    def _evaluate(self, node: Node, role: Role) -> Any:
        try:
            return self.evaluate(node, role)
        except Exception as error:
            raise PassError("chunk", error, node) from error

    def evaluate(self, node: Node, role: Role) -> Any:
        """The value of a node: as `emit` has registered for its op, or else by the op itself."""
        function, self.at_places = EMIT.get(node.target), node in self.facts.biases
        if function is not None:
            return function(self, node, role)
        layout = self.facts.layouts[node] if node.target in ALIGNED else None
        return self.call(node, role, layout)

    def call(self, node: Node, role: Role, result: tuple[Axis | None, ...] | None) -> Any:
        """The node's own op on the chunk's operands."""
        roles = dict(edges(self.facts, node, role)) if node in self.facts.mixings else {}

        def value(operand: Node) -> Any:
            return self.aligned(operand, roles.get(operand, role), result)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        if is_foreign(node.target) and node in self.facts.needs_grad:
            return call_foreign(node.target, args, kwargs)
        return node.target(*args, **kwargs)

    def aligned(self, operand: Node, role: Role, result: tuple[Axis | None, ...] | None) -> Any:
        """An operand that broadcasts to a result with these axes (None: its axes are its own)."""
        axes = None
        if result is not None and self.facts.kinds[operand] in (Kind.WHOLE, Kind.SQUARE):
            rank = tensors_of(operand)[0].dim()
            axes = result[len(result) - rank :] if rank else ()
        return self.operand(operand, role, axes)

    def dropout(self, node: Node, value: Tensor, probability: float) -> Tensor:
        """Dropout of a tensor of any shape; its mask is drawn again, the same, when the chunk is recomputed.

        The seed is that of the chunk and of the op: not every program of a segment runs all of its ops.
        """
        return value * dropout_mask(value.detach(), probability, self.seed_of(node))

    def seed_of(self, node: Node) -> Any:
        """From which an op draws random numbers: another one for each chunk and op."""
        return self.seed + 1 + self.program.segment.nodes.index(node)


def evaluated(
    program: ChunkProgram, bindings: dict[Node, Any], ranges: Ranges, reader: StateReader, seed: Size = 0
) -> list[Tensor]:
    """The targets of a chunk program, in the dtypes and, but for the rows, the shapes of the graph.

    Args:
        program: what is run.
        bindings: rows of the streamed inputs, parameters, whole values (whole), sizes.
        ranges: which rows and columns.
        reader: how a state is read.
        seed: seed of the chunk's random ops.
    """
    program.origins = Origins()
    return Evaluation(program, bindings, ranges, reader, seed).targets()


def narrow(
    value: Tensor,
    dim: int,
    axis: Axis,
    start: Size,
    length: Size,
    total: Size,
    resolve: Callable[[sympy.Expr], Size],
) -> Tensor:
    """Positions [start, start + length) of a dim that carries the sequence, merged dims included.

    `total` is how many positions the dim has, or -1 for as many as there is room for.
    """
    if axis.simple:
        return value.narrow(dim, start, length)
    split = value.unflatten(dim, (resolve(axis.outer), total, resolve(axis.inner)))
    return split.narrow(dim + 1, start, length).flatten(dim, dim + 2)


EMIT: dict[Any, Callable[[Evaluation, Node, Role], Any]] = {}


def emit(*ops: Any) -> Callable:
    """Register how an op is written in a chunk program, where it is not the op itself."""

    def register(function: Callable) -> Callable:
        for op in ops:
            EMIT[op] = function
        return function

    return register
