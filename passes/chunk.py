"""chunk: the program of one chunk of a segment, from the segment's nodes.

A segment's nodes are evaluated again on the rows of a chunk. Each node has a role: ROW, on the chunk's own
rows, or COLUMN, on the columns the chunk reads. Between the two stands the state: values that are computed
once by rows, kept in a buffer, and read back as columns. Sizes that mention the sequence resolve by role.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from . import attention, masks
from .ir import (
    Axis,
    Facts,
    Kind,
    Mask,
    PassError,
    Role,
    Segment,
    evaluate,
    evaluate_size,
    operands,
    shape_of,
    tensors_of,
)
from .normalize import grouped_source
from .origins import Origins
from .rules.contractions import sdpa_arguments
from .rules.pointwise import ELEMENTWISE_LOSSES, pointwise_ops

aten = torch.ops.aten
Size = Any  # int or SymInt


@dataclass
class Ranges:
    """The part of the sequence a chunk program sees; ints, or SymInts while it is traced.

    Rows [start, start + rows); columns [low, low + columns). `prefix` columns come before the own rows.
    """

    start: Size
    rows: Size
    low: Size
    prefix: Size
    columns: Size
    total: Size

    def interval(self, role: Role) -> tuple[Size, Size]:
        """First position and length of a role."""
        return (self.start, self.rows) if role is Role.ROW else (self.low, self.columns)


@dataclass
class State:
    """A value kept for the whole segment: computed by rows, read as columns."""

    node: Node
    dim: int


VIEW_ONLY = {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.expand.default, aten.squeeze.dim, aten.t.default, aten.mT.default, aten.contiguous.default,
    aten.clone.default, aten.repeat_interleave.self_int, aten.flatten.using_ints,
}  # fmt: skip
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.reshape_as.default,
    # by its sizes: `squeeze` itself would also take away the rows of a chunk of one row
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
ALIGNED = {*pointwise_ops(), *ELEMENTWISE_LOSSES}


def find_states(facts: Facts, segment: Segment) -> list[State]:
    """Where the state of a segment is cut: above each column operand, at the fewest bytes a row.

    Only views and repetitions are crossed, so that no arithmetic is done again for every chunk that reads
    the prefix; keys and values are kept before they are repeated over query heads.
    """
    found: dict[Node, State] = {}
    inside = set(segment.nodes)
    for mixing in segment.mixings:
        for operand in [n for n, r in edges(facts, mixing.node, Role.ROW) if r is Role.COLUMN]:
            if facts.kinds[operand] is not Kind.STREAM:
                continue  # data: its columns are slices
            best = node = operand
            while node.target in VIEW_ONLY and isinstance(node.args[0], Node) and node.args[0] in inside:
                node = node.args[0]
                if _simple_axis(facts, node) is not None and _size(facts, node) <= _size(facts, best):
                    best = node
            dim = _simple_axis(facts, best)
            assert dim is not None
            found[best] = State(best, dim)
    return list(found.values())


def _simple_axis(facts: Facts, node: Node) -> int | None:
    layout = facts.layouts.get(node) or ()
    dims = [d for d, a in enumerate(layout) if a is not None]
    return dims[0] if len(dims) == 1 and layout[dims[0]] == Axis() else None


def _size(facts: Facts, node: Node) -> float:
    value = sympy.Mul(*shape_of(node))
    return float(value.subs(dict.fromkeys(value.free_symbols, 4096))) * tensors_of(node)[0].element_size()


def edges(facts: Facts, node: Node, role: Role) -> list[tuple[Node, Role]]:
    """Operands of a node with the role in which each is read."""
    if node not in facts.mixings:
        return [(n, role) for n in operands(node)]
    if node.target is aten.scaled_dot_product_attention.default:
        call = sdpa_arguments(node)
        return [(call["query"], role), (call["key"], Role.COLUMN), (call["value"], Role.COLUMN)]
    left, right = node.args[-2:] if node.target is not aten.baddbmm.default else node.args[1:3]
    grouped = grouped_columns(node)
    return [(left, role), (right if grouped is None else grouped.source, Role.COLUMN)]


@dataclass(frozen=True)
class Grouped:
    """A product with heads that were repeated: `source` before it, `groups` times, then transposed or not."""

    source: Node
    groups: int
    transposed: bool


def grouped_columns(node: Node) -> Grouped | None:
    """How a product reads repeated heads, if it does: they are not repeated over the columns."""
    if node.target is not aten.matmul.default or not isinstance(node.args[1], Node):
        return None
    right = node.args[1]
    transposed = right.target is aten.transpose.int and {d % 4 for d in right.args[1:]} == {2, 3}
    found = grouped_source(right.args[0] if transposed else right)
    return None if found is None else Grouped(found[0], found[1], transposed)


class ChunkProgram:
    """Evaluates a segment on one chunk.

    Args:
        facts: what is known about the graph.
        segment: the segment.
        targets: nodes to compute, by rows.
        plain: masks that need not be built, since nothing but causality is left of them.
        keep: attentions whose output and log-sum-exp are wanted as well; a run leaves them in `kept`.
    """

    def __init__(
        self,
        facts: Facts,
        segment: Segment,
        targets: list[Node],
        plain: frozenset[Mask],
        keep: frozenset[Node] = frozenset(),
    ) -> None:
        self.facts, self.segment, self.targets, self.plain = facts, segment, targets, plain
        self.keep = keep
        self.kept: list[Tensor] = []
        self.states = {s.node: s for s in find_states(facts, segment)}
        self.needed = self._demand()
        self.readers = self._count_readers()
        self.origins: Origins | None = None

    def _demand(self) -> list[tuple[Node, Role]]:
        """(node, role) pairs the targets need, in graph order, columns of a node after its rows."""
        inside, needed = set(self.segment.nodes), set()
        pending = [(n, Role.ROW) for n in self.targets]
        while pending:
            node, role = pending.pop()
            is_state = role is Role.COLUMN and node in self.states
            if (node, role) in needed or not (is_state or node in inside):
                continue
            needed.add((node, role))
            pending.extend([(node, Role.ROW)] if is_state else edges(self.facts, node, role))
        # a streamed input may be a state itself: its rows are given, its columns are read
        nodes = (*self.segment.rows, *self.segment.nodes)
        return [(n, r) for n in nodes for r in (Role.ROW, Role.COLUMN) if (n, r) in needed]

    def _count_readers(self) -> dict[Node, int]:
        """How many column operands come from each state."""
        count: dict[Node, int] = {}
        for node, role in self.needed:
            for operand, wanted in edges(self.facts, node, role):
                if wanted is Role.COLUMN and role is Role.ROW:
                    for state in self.sources(operand):
                        count[state] = count.get(state, 0) + 1
        return count

    def sources(self, node: Node) -> list[Node]:
        """The state that a node is a view of, in a list; an empty list if it is a view of none."""
        while node not in self.states and node.target in VIEW_ONLY:
            node = node.args[0]
        return [node] if node in self.states else []

    def run(
        self, bindings: dict[Node, Any], ranges: Ranges, reader: StateReader, seed: Size = 0
    ) -> list[Tensor]:
        """The targets on the chunk's rows, in the dtypes and, but for the rows, the shapes of the graph.

        Args:
            bindings: rows of the streamed inputs, parameters, whole values (whole), sizes.
            ranges: which rows and columns.
            reader: how a state is read.
            seed: seed of the chunk's random ops.
        """
        self.origins, self.kept = Origins(), []
        return Evaluation(self, bindings, ranges, reader, seed).targets()


class StateReader:
    """How a chunk program reads its states. Subclasses differ in what backward does."""

    def columns(self, state: State, own: Tensor) -> Tensor:
        """The columns of a state: `ranges.columns` entries in its dim, the chunk's own rows among them.

        `own` has the rows that the chunk has computed: `ranges.rows` entries in that dim.
        """
        raise NotImplementedError

    def buffers_of(self, state: State) -> tuple[Tensor, Tensor, Tensor] | None:
        """The columns, the buffer of their gradient in the same shape, and the chunk's own rows of that.

        None if reads are not differentiated in place.
        """
        return None


class Evaluation:
    """One run of a chunk program; its parameters are those of `ChunkProgram.run`.

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
            self.blocks[key] = masks.materialize(node, tuple(dims), self.fetch, self.is_whole)
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
        function = EMIT.get(node.target)
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
        number = self.program.segment.nodes.index(node)
        mask = attention.dropout_mask(value.detach(), probability, self.seed + 1 + number)
        return value * mask


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
