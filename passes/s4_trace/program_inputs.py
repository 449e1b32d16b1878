"""program_inputs: what goes into a chunk program, in which order, and fake tensors to trace it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..graph.facts import Facts, Kind, expression, shape_of, sum_dtype, tensors_of
from ..graph.symbols import SymbolTable, evaluate
from ..s3_cut.alive_bytes import row_axis
from ..step.instructions import BY_COLUMNS, BY_ROWS, Buffer, BufferKind
from .carried_state import Ranges, state_of_recurrence
from .evaluation import narrow

SIZES = ("rows", "prefix", "low", "total")
# Lengths that are traced as numbers and not as symbols: symbolic shapes specialise on 0 and 1.
SPECIAL = (0, 1)


@dataclass(frozen=True)
class Extent:
    """Sizes of one chunk: int values of `Ranges`. In FULL reach the columns are all of the sequence.

    Attributes:
        of_others: the columns are those of this device, and others have more: see NOTE [columns in blocks].
            `prefix` counts them, and `low` is `start` without it.
    """

    rows: int
    prefix: int
    low: int
    total: int
    full: bool = False
    of_others: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in the order of `SIZES`."""
        return (self.rows, self.prefix, self.low, self.total)

    @property
    def pattern(self) -> tuple:
        """What a traced program depends on: which lengths are special."""
        special = [getattr(self, n) if getattr(self, n) in SPECIAL else None for n in SIZES if n != "low"]
        return (*special, self.full, self.of_others)

    @property
    def start(self) -> int:
        """First row of the chunk."""
        return self.low + self.prefix

    @property
    def columns(self) -> int:
        """How many columns it reads, from `low` on."""
        return self.total if self.full else self.prefix + self.rows

    def own(self) -> Extent:
        """The same rows with no columns before them, for programs that read no state."""
        return Extent(self.rows, 0, self.start, self.total)

    def ranges(self, sizes: Callable[[str], Any]) -> Ranges:
        """The rows and columns of the chunk; `sizes` gives the value of a name of `SIZES`, maybe symbolic."""
        rows, prefix, low, total = (sizes(n) for n in SIZES)
        columns = total if self.full else prefix + rows
        return Ranges(low + prefix, rows, low, prefix, columns, total, self.of_others)


@dataclass
class Slots:
    """The inputs of a program in order: the numbers of `SIZES`, a seed, other sizes, and tensors.

    Attributes:
        symbols: the other sizes.
        tensors: in the order of `BufferKind`.
        removed: rows that the sequence of the segment has less than that of the model.
    """

    symbols: list[sympy.Symbol]
    tensors: list[Buffer]
    removed: int = 0


def input_names(slots: Slots) -> list[str]:
    """Readable names of a program's inputs, in order."""
    return [*SIZES, "seed", *(str(s) for s in slots.symbols), *(b.name for b in slots.tensors)]


class Unpacked:
    """The flat inputs of a program.

    Attributes:
        tensors: by kind and node.
    """

    def __init__(self, slots: Slots, extent: Extent, flat: Iterable[Any]) -> None:
        self.removed = slots.removed
        stream = iter(flat)
        sizes = {name: next(stream) for name in SIZES}
        self.ranges = extent.ranges(sizes.__getitem__)
        self.seed = next(stream)
        self.symbols = {symbol: next(stream) for symbol in slots.symbols}
        self.tensors: dict[BufferKind, dict[Node, Tensor]] = {kind: {} for kind in BufferKind}
        for buffer, value in zip(slots.tensors, stream, strict=True):
            assert buffer.node is not None
            self.tensors[buffer.kind][buffer.node] = value

    def bindings(self, facts: Facts, replaced: Mapping[Node, Tensor] | None = None) -> dict[Any, Any]:
        """What the nodes of a segment are evaluated with: tensors by node, sizes by symbol.

        Args:
            replaced: values that some nodes have instead, of the same shape and dtype.
        """
        total = {facts.sequence: self.ranges.total + self.removed}
        kinds = (BufferKind.WHOLE, BufferKind.ROWS, BufferKind.CONSTANT)
        given = {n: v for kind in kinds for n, v in self.tensors[kind].items()}
        return {**self.symbols, **total, **given, **(replaced or {})}


class FakeInputs:
    """Fake inputs of a program, in slot order, with the symbols of their sizes.

    NOTE [longer than the chunk needs]: a view of a buffer is contiguous only where it ends with the buffer.
    Programs are traced as if it never did (total + 64 rows), which is right for both cases; so what tracing
    assumed about the total length is not a condition on later calls.
    """

    def __init__(
        self,
        facts: Facts,
        slots: Slots,
        extent: Extent,
        table: SymbolTable,
        mode: FakeTensorMode,
        args: list[Any],
    ) -> None:
        self.facts, self.table, self.mode = facts, table, mode
        self.names: dict[sympy.Symbol, str] = {}
        sizes: dict[str, Any] = {}
        for name in SIZES:
            value = getattr(extent, name)
            if name == "total" and not extent.full:
                value += 64  # NOTE [longer than the chunk needs]
            if name == "low" and not extent.full:
                sizes[name] = self._symbol(name, value, start=True)
            else:
                sizes[name] = value if value in SPECIAL else self._symbol(name, value)
        self.ranges = extent.ranges(sizes.__getitem__)
        self.sizes: dict[Any, Any] = {facts.sequence: sizes["total"] + slots.removed}
        offset = len(SIZES) + 1
        for symbol, value in zip(slots.symbols, args[offset:], strict=False):
            self.sizes[symbol] = value if value in SPECIAL else self._symbol(str(symbol), value)
        self.flat: list[Any] = [*(sizes[n] for n in SIZES), self._symbol("seed", 2**40)]
        self.flat += [self.sizes[s] for s in slots.symbols]
        self.flat += map(self._tensor, slots.tensors)

    def _tensor(self, buffer: Buffer) -> Tensor:
        assert buffer.node is not None
        if buffer.kind in BY_ROWS:
            return self._rows(buffer.node)
        if buffer.by_chunk:
            return self._states_of_recurrence(buffer)
        if buffer.kind in BY_COLUMNS:
            full = self._contiguous(buffer.node, buffer.wide)
            return full.narrow(buffer.dim, self.ranges.low, self.ranges.columns)
        return self._whole(buffer.node, buffer.wide)

    def _states_of_recurrence(self, buffer: Buffer) -> Tensor:
        """Before the chunk and after it."""
        assert buffer.node is not None
        sizes, dtype = state_of_recurrence(buffer.node, buffer.wide)
        device = tensors_of(buffer.node)[0].device
        with self.mode:
            shape = [2, *map(self._size, sizes)]
            return torch.empty(shape, dtype=dtype, device=device)

    def _symbol(self, name: str, hint: int, start: bool = False) -> Any:
        value = self.table.new(name, hint, start)
        if isinstance(value, torch.SymInt):
            self.names[value.node.expr] = name
        return value

    def _size(self, expr: sympy.Expr) -> Any:
        return evaluate(expr, self.sizes)

    def _whole(self, node: Node, wide: bool = False) -> Tensor:
        value = tensors_of(node)[0]
        shape = [self._size(s) for s in shape_of(node)]
        stride = [self._size(expression(s)) for s in value.stride()]
        if node.op == "call_function" and self.facts.kinds[node] is Kind.REDUCED:
            return self._contiguous(node, wide)  # it comes out of a segment that runs unchunked
        with self.mode:
            dtype = sum_dtype(value.dtype) if wide else value.dtype
            return torch.empty_strided(shape, stride, dtype=dtype, device=value.device)

    def _rows(self, node: Node) -> Tensor:
        found = row_axis(self.facts, node)
        assert found is not None
        dim, axis = found
        ranges, full = self.ranges, self._contiguous(node)
        return narrow(full, dim, axis, ranges.start, ranges.rows, ranges.total, self._size)

    def _contiguous(self, node: Node, wide: bool = False) -> Tensor:
        value = tensors_of(node)[0]
        dtype = sum_dtype(value.dtype) if wide else value.dtype
        with self.mode:
            return torch.empty([self._size(s) for s in shape_of(node)], dtype=dtype, device=value.device)
