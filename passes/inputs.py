"""inputs: what goes into a chunk program, in which order, and fake tensors to trace it with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from .capture import SymbolTable
from .chunk import Ranges, State, narrow
from .ir import Facts, evaluate, expression, shape_of, sum_dtype, tensors_of
from .segment import row_axis

SIZES = ("rows", "prefix", "low", "total")
# Lengths that are traced as numbers and not as symbols: symbolic shapes specialise on 0 and 1.
SPECIAL = (0, 1)


@dataclass(frozen=True)
class Extent:
    """Sizes of one chunk: int values of `Ranges`. In FULL reach the columns are all of the sequence."""

    rows: int
    prefix: int
    low: int
    total: int
    full: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in the order of `SIZES`."""
        return (self.rows, self.prefix, self.low, self.total)

    @property
    def pattern(self) -> tuple:
        """What a traced program depends on: which lengths are special."""
        special = [getattr(self, n) if getattr(self, n) in SPECIAL else None for n in SIZES if n != "low"]
        return (*special, self.full)

    @property
    def start(self) -> int:
        """First row of the chunk."""
        return self.low + self.prefix

    def own(self) -> Extent:
        """The same rows with no columns before them, for programs that read no state."""
        return Extent(self.rows, 0, self.start, self.total)

    def ranges(self, sizes: Callable[[str], Any]) -> Ranges:
        rows, prefix, low, total = (sizes(n) for n in SIZES)
        columns = total if self.full else prefix + rows
        return Ranges(low + prefix, rows, low, prefix, columns, total)


@dataclass
class Slots:
    """Order of a program's inputs; nodes are those of the segment the program was traced from."""

    symbols: list[sympy.Symbol]
    rows: list[Node]
    constants: list[Node]
    whole: list[Node]
    states: list[State] = field(default_factory=list)
    gradients: bool = False
    cotangents: list[Node] = field(default_factory=list)
    accumulators: list[Node] = field(default_factory=list)
    removed: int = 0
    wide: bool = False  # sums over chunks are held in float32 where the values are in half precision


def input_names(slots: Slots) -> list[str]:
    """Readable names of a program's inputs, in order."""
    names = [*SIZES, "seed", *(str(s) for s in slots.symbols)]
    names += [f"x_{n.name}" for n in slots.rows]
    names += [f"p_{n.name}" for n in slots.constants]
    names += [f"w_{n.name}" for n in slots.whole]
    names += [f"state_{s.node.name}" for s in slots.states]
    if slots.gradients:
        names += [f"grad_state_{s.node.name}" for s in slots.states]
    names += [f"grad_{n.name}" for n in slots.cotangents]
    return names + [f"grad_p_{n.name}" for n in slots.accumulators]


class Unpacked:
    """The flat inputs of a program by role."""

    def __init__(self, slots: Slots, extent: Extent, flat: Iterable[Any]) -> None:
        self.removed = slots.removed
        stream = iter(flat)
        sizes = dict(zip(SIZES, stream, strict=False))
        self.ranges = extent.ranges(sizes.__getitem__)
        self.seed = next(stream)
        take = lambda keys: dict(zip(keys, itertools.islice(stream, len(keys)), strict=True))  # noqa: E731
        self.symbols = take(slots.symbols)
        self.rows, self.constants, self.whole = take(slots.rows), take(slots.constants), take(slots.whole)
        nodes = [s.node for s in slots.states]
        self.states = take(nodes)
        self.gradients = take(nodes) if slots.gradients else {}
        self.cotangents = take(slots.cotangents)
        self.accumulators = take(slots.accumulators)

    def bindings(self, facts: Facts, **replaced: dict[Node, Tensor]) -> dict[Any, Any]:
        parts = {"rows": self.rows, "constants": self.constants, **replaced}
        total = {facts.sequence: self.ranges.total + self.removed}
        return {**self.symbols, **total, **self.whole, **parts["rows"], **parts["constants"]}


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
        self.flat += [self._rows(n) for n in slots.rows]
        self.flat += [self._whole(n) for n in slots.constants]
        self.flat += [self._whole(n) for n in slots.whole]
        self.flat += [self._columns(s) for s in slots.states]
        if slots.gradients:
            self.flat += [self._columns(s, slots.wide) for s in slots.states]
        self.flat += [self._rows(n) for n in slots.cotangents]
        self.flat += [self._whole(n, slots.wide) for n in slots.accumulators]

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

    def _columns(self, state: State, wide: bool = False) -> Tensor:
        full = self._contiguous(state.node, wide)
        return full.narrow(state.dim, self.ranges.low, self.ranges.columns)
