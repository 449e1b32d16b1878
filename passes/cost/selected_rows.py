"""What a selection of rows holds while it runs, and what it computes, if its rows are spread evenly.

NOTE [evenly selected]: how many rows a mask selects is in no size. Together the masks of a selection are
mostly those of a router: each asks which rows have chosen one expert, and each choice is in one of them. So
each of N masks is taken to hold one in N of its choices, and the ops are run so on tensors without memory. In
the backward, which holds what all experts have computed, it matters little how many rows each of them has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..graph.facts import expression, tensors_of
from ..graph.ops.row_selection import SELECTED_ROWS, gradients_of, graph_of, rows_of
from ..graph.symbols import in_numbers
from .live_bytes import LiveBytes, bytes_in
from .work import CountedWork, Work

aten = torch.ops.aten
SELECTS = (aten.where.default, aten.nonzero_numpy.default, aten.nonzero.default)
READS_INDICES = (aten.index.Tensor, aten.index_put.default)
ANY = (aten.any.dim, aten.any.dims)
#: A constant and a slope: bytes, or work, and how many more a row adds.
Line = tuple[sympy.Expr, sympy.Expr]
#: Rows for each mask that are tried: what is held after an op is a constant and a multiple of them.
FEW, MORE = 64, 128


def inner_bytes(node: Node) -> list[sympy.Expr]:
    """Bytes that a selection of rows holds within, over its operands and results: the largest of these.

    They are not put into one expression: sympy would try to prove which of them is the largest.
    """
    (few, (first, _)), (more, (second, _)) = _tried(node)
    lines = {(sympy.S.Zero, sympy.S.Zero)}
    lines |= {_line(few, a, more, b) for a, b in zip(first, second, strict=True)}
    rows = sympy.Mul(*_sizes_of_rows(node))
    return [a + b * rows for a, b in _highest(lines)]


def inner_work(node: Node) -> Work:
    """What a selection of rows computes and moves."""
    (few, (_, first)), (more, (_, second)) = _tried(node)
    lines = [_line(few, a, more, b) for a, b in zip(first.parts, second.parts, strict=True)]
    rows = sympy.Mul(*_sizes_of_rows(node))
    return Work(*(a + b * rows for a, b in lines))


def _tried(node: Node) -> list[tuple[int, tuple[list[int], Work]]]:
    """Two numbers of rows, with what is held after each op then, over the results, and the work."""
    sizes = _sizes_of_rows(node)
    symbols = sorted({s for size in sizes for s in size.free_symbols}, key=str)
    masks = max(1, len(_masks_of(graph_of(node.args[0]))))  # type: ignore[arg-type]
    found = []
    for number in (FEW, MORE):
        known = {s: 1 if k else number * masks for k, s in enumerate(symbols)}
        rows = math.prod(in_numbers(s, known) for s in sizes)
        found.append((rows, _measured(*_signature(node, known))))
    return found


def _line(few: int, first: int, more: int, second: int) -> Line:
    """The constant and the slope of the line through two points."""
    slope = sympy.Rational(second - first, more - few) if more > few else sympy.S.Zero
    return sympy.sympify(first - slope * few), slope


def _highest(lines: Iterable[Line]) -> list[Line]:
    """Those lines which no others together are above, for any number of rows: their upper envelope."""
    kept: list[Line] = []
    for line in sorted(lines, reverse=True):  # the highest at no rows first; the next ones are so later
        if kept and line[1] <= kept[-1][1]:
            continue
        while len(kept) > 1 and _meet(kept[-2], line) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return kept


def _meet(flat: Line, steep: Line) -> sympy.Expr:
    """The number of rows at which two lines meet."""
    return (flat[0] - steep[0]) / (steep[1] - flat[1])


def _sizes_of_rows(node: Node) -> list[sympy.Expr]:
    """The symbolic sizes of the operand that the result is like, or of the gradient of the result."""
    operands: Any = node.args[2]
    like = operands[node.args[1]] if node.target is SELECTED_ROWS else node.args[3]
    return [s for s in map(expression, tensors_of(like)[0].shape) if not s.is_Integer]


def _signature(node: Node, known: dict[Any, int]) -> Any:
    """All that decides what an op holds: itself, its numbers, shapes and dtypes, and choices of its masks."""

    def like(value: Node) -> tuple[tuple[int, ...], torch.dtype]:
        given = tensors_of(value)[0]
        return tuple(in_numbers(expression(s), known) for s in given.shape), given.dtype

    number, other, operands, *gradient = node.args
    other = other if isinstance(other, int) else tuple(other)  # type: ignore[arg-type]
    shapes = tuple(map(like, (*operands, *gradient)))  # type: ignore[misc]
    return node.target, number, other, shapes, tuple(map(_choices, operands))  # type: ignore[arg-type]


def _choices(mask: Node) -> int:
    """How many choices an entry of a mask stands for: where it asks whether any of them is the one."""
    while isinstance(mask.target, torch._ops.OpOverload) and mask.target.is_view:
        mask = mask.args[0]  # type: ignore[assignment]
    if mask.target not in ANY:
        return 1
    before, own = (sympy.Mul(*map(expression, tensors_of(n)[0].shape)) for n in (mask.args[0], mask))  # type: ignore[arg-type]
    return in_numbers(before / own, {})


@functools.cache
def _measured(
    target: Any, number: int, other: Any, shapes: tuple, choices: tuple[int, ...]
) -> tuple[list[int], Work]:
    """Bytes after each op, over the results, and the work; nothing, if it cannot be run without memory."""
    values = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    operands = values[: len(choices)]
    run = _EvenlySelected(graph_of(number), choices).run
    held, done = _Held(values), CountedWork()
    try:
        with held, done:
            if target is SELECTED_ROWS:
                made = [rows_of(run, operands)]
            else:
                made = gradients_of(run, other, operands, values[-1])
    except Exception:  # whatever an op asks of values; the step runs it all the same
        return [], Work()
    return [live - bytes_in(made) for live in held.after], done.work


class _Held(LiveBytes):
    """A meter that keeps what was alive after each op, in bytes."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.after: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.after.append(self.live)
        return made


def _masks_of(graph: GraphModule) -> set[Node]:
    """What selects rows."""
    found: set[Node] = set()
    for node in graph.graph.nodes:
        if node.target in SELECTS:
            found.add(node.args[0])
        elif node.target in READS_INDICES:
            found.update(n for n in node.args[1] if n is not None and n.meta["val"].dtype is torch.bool)
    return found


class _EvenlySelected(Interpreter):
    """Runs the ops of a selection on tensors without memory, see NOTE [evenly selected].

    Args:
        graph: the ops.
        choices: for each operand, of how many choices an entry of it tells.
    """

    def __init__(self, graph: GraphModule, choices: tuple[int, ...]) -> None:
        super().__init__(graph)
        self.masks = max(1, len(_masks_of(graph)))
        placeholders = (n for n in graph.graph.nodes if n.op == "placeholder")
        self.choices = dict(zip(placeholders, choices, strict=True))

    def run_node(self, n: Node) -> Any:
        """Run an op; one that selects rows gives as many as it has if they are spread evenly."""
        if n.target in SELECTS:
            indices = self._indices(n.args[0])
            return torch.stack(indices, 1) if n.target is aten.nonzero.default else indices
        if n.target in READS_INDICES:
            source, indices, *rest = n.args
            loaded = torch.fx.node.map_arg((source, rest, dict(n.kwargs)), self.env.__getitem__)
            return n.target(loaded[0], self._loaded(indices), *loaded[1], **loaded[2])
        return super().run_node(n)

    def _loaded(self, indices: Any) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            mask = index is not None and self.env[index].dtype is torch.bool
            found += self._indices(index) if mask else [None if index is None else self.env[index]]
        return found

    def _indices(self, mask: Any) -> list[Tensor]:
        value = self.env[mask]
        number = min(value.numel(), value.numel() * self.choices.get(mask, 1) // self.masks)
        return [torch.empty(number, dtype=torch.int64, device="meta") for _ in range(value.dim())]
