"""What a chunk sees of the sequence: its rows, the columns that it reads, and the state between the two.

The state of a segment are values that are computed once by rows, kept in a buffer, and read back as columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..graph.facts import (
    Axis,
    Facts,
    Kind,
    Role,
    Segment,
    expression,
    operands,
    shape_of,
    sum_dtype,
    tensors_of,
)
from ..graph.op_arguments import sdpa_arguments
from ..graph.ops.causal_convolution import CAUSAL_CONV1D, rows_before
from ..graph.ops.recurrence import RECURRENCE, RECURRENCES
from ..rules.op_sets import VIEW_ONLY
from ..s1_capture.rewrites.products import grouped_source, one_for_each

aten = torch.ops.aten
Size = Any  # int or SymInt


@dataclass
class Ranges:
    """The part of the sequence a chunk program sees; ints, or SymInts while it is traced.

    Rows [start, start + rows); columns [low, low + columns). `prefix` columns come before the own rows.
    With `of_others` other devices have more columns, see NOTE [columns in blocks].
    """

    start: Size
    rows: Size
    low: Size
    prefix: Size
    columns: Size
    total: Size
    of_others: bool = False

    def interval(self, role: Role) -> tuple[Size, Size]:
        """First position and length of a role."""
        return (self.start, self.rows) if role is Role.ROW else (self.low, self.columns)


@dataclass
class State:
    """A value kept for the whole segment: computed by rows, read as columns.

    Attributes:
        by_chunk: it is the state of a recurrence, `node`, which each chunk takes from the one before.
        before: so many rows before the chunk's own are read, and no more; None: all columns.
    """

    node: Node
    dim: int
    by_chunk: bool = False
    before: int | None = None

    def columns_before(self, ranges: Ranges) -> Size:
        """How many columns are read before the chunk's own: fewer than `before` at the start alone."""
        if self.before is None:
            return ranges.prefix
        return self.before if ranges.prefix >= self.before else ranges.prefix


def find_states(facts: Facts, segment: Segment) -> list[State]:
    """Where the state of a segment is cut: above each column operand, at the fewest bytes a row.

    Only views and repetitions are crossed, so that no arithmetic is done again for every chunk that reads
    the prefix; keys and values are kept before they are repeated over query heads.
    """
    found: dict[Node, State] = {}
    inside = set(segment.nodes)
    for mixing in segment.mixings:
        if mixing.node.target is RECURRENCE:
            found[mixing.node] = State(mixing.node, 0, by_chunk=True)
        for operand in [n for n, r in edges(facts, mixing.node, Role.ROW) if r is Role.COLUMN]:
            if facts.kinds[operand] is not Kind.STREAM:
                continue  # data: its columns are slices
            best = node = operand
            while node.target in VIEW_ONLY and isinstance(node.args[0], Node) and node.args[0] in inside:
                node = node.args[0]
                if node.target is RECURRENCE:
                    break  # it has a state of its own
                if _simple_axis(facts, node) is not None and _size(facts, node) <= _size(facts, best):
                    best = node
            dim = _simple_axis(facts, best)
            assert dim is not None
            found[best] = State(best, dim)
    return [_limited(facts, segment, state) for state in found.values()]


def _limited(facts: Facts, segment: Segment, state: State) -> State:
    """A state that a convolution alone reads, as it is: it looks at few rows."""
    readers = [
        m.node for m in segment.mixings for n, r in edges(facts, m.node, Role.ROW)
        if r is Role.COLUMN and state.node in _behind(n)
    ]  # fmt: skip
    if [r.target for r in readers] != [CAUSAL_CONV1D] or readers[0].args[0] is not state.node:
        return state
    return dataclasses.replace(state, before=rows_before(readers[0]))


def _behind(node: Node) -> Iterator[Node]:
    """A node and those that it is a view of."""
    yield node
    while node.target in VIEW_ONLY and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _simple_axis(facts: Facts, node: Node) -> int | None:
    layout = facts.layouts.get(node) or ()
    dims = [d for d, a in enumerate(layout) if a is not None]
    return dims[0] if len(dims) == 1 and layout[dims[0]] == Axis() else None


def state_of_recurrence(node: Node, wide: bool = False) -> tuple[list[sympy.Expr], torch.dtype]:
    """The sizes and the dtype of the state of a recurrence; `wide`: the dtype of sums of its gradients."""
    name, given, settings, cast = node.args
    known = RECURRENCES[name]
    values = [None if n is None else tensors_of(n)[0] for n in given]
    dtype = known.dtypes(values, settings, cast)[1]
    sizes = list(map(expression, known.state_sizes_of(values)))
    return sizes, sum_dtype(dtype) if wide else dtype


def _size(facts: Facts, node: Node) -> float:
    value = sympy.Mul(*shape_of(node))
    return float(value.subs(dict.fromkeys(value.free_symbols, 4096))) * tensors_of(node)[0].element_size()


def edges(facts: Facts, node: Node, role: Role) -> list[tuple[Node, Role]]:
    """Operands of a node with the role in which each is read."""
    if node not in facts.mixings or not facts.mixings[node].columns:
        return [(n, role) for n in operands(node)]
    if node.target is aten.scaled_dot_product_attention.default:
        call = sdpa_arguments(node)
        found = [(call["query"], role), (call["key"], Role.COLUMN), (call["value"], Role.COLUMN)]
        mask = call["attn_mask"]
        streamed = isinstance(mask, Node) and facts.kinds[mask] is Kind.STREAM
        return [*found, (mask, role)] if streamed else found
    if node.target is CAUSAL_CONV1D:
        return [(n, Role.COLUMN if n is node.args[0] else role) for n in operands(node)]
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
    repeated = right.args[0] if transposed else right
    found = grouped_source(repeated)
    if found is None or not one_for_each(node.args[0], repeated):
        return None
    return Grouped(found[0], found[1], transposed)


class StateReader:
    """How a chunk program reads its states. Subclasses differ in what backward does.

    Attributes:
        pieces: how many parts of a causal prefix are differentiated one after the other.
    """

    pieces = 1

    def columns(self, state: State, own: Tensor) -> Tensor:
        """The columns of a state: `ranges.columns` entries in its dim, the chunk's own rows among them.

        Of a state with `before`, those of `columns_before` and the own rows.

        `own` has the rows that the chunk has computed: `ranges.rows` entries in that dim.
        """
        raise NotImplementedError

    def recur(self, state: State, given: tuple, operands: list[Tensor | None]) -> Tensor:
        """The rows of a recurrence, from the state that the chunk before left; it leaves one for the next.

        Args:
            given: the arguments of the op.
            operands: of it, each in its shape and dtype there, but with the chunk's own rows.
        """
        raise NotImplementedError

    def buffers_of(self, state: State) -> tuple[Tensor, Tensor, Tensor] | None:
        """The columns, the buffer of their gradient in the same shape, and the chunk's own rows of that.

        None if reads are not differentiated in place.
        """
        return None
