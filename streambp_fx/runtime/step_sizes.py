"""The sizes of a call: read from its inputs, and tested against what capture assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..errors import CompileError
from ..passes.graph.facts import Facts, expression
from ..passes.graph.symbols import compiled


def size_places(facts: Facts) -> list[tuple[int, int | None, sympy.Symbol | None, int]]:
    """Where the sizes of a graph stand in its inputs: (position, dim, symbol, number added to it).

    Without a symbol it is a number that capture took for a constant. Sizes of parameters are left out.
    """
    placeholders = [n for n in facts.nodes if n.op == "placeholder"]
    return [
        (k, dim, symbol, more)
        for k, n in enumerate(placeholders)
        for dim, size in _declared(n)
        for symbol, more in _linear(size)
        if symbol is not None or n not in facts.parameters
    ]


class SizesDiffer(CompileError):
    """The sizes of a call are not those that a graph was captured for; it is compiled again for them."""


def read_sizes(places: list, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The value of each size symbol, from the graph's inputs.

    Raises:
        SizesDiffer: inputs had one size when the graph was captured, and now they have several.
    """
    sizes: dict[sympy.Symbol, int] = {}
    for position, dim, symbol, more in places:
        value = inputs[position] if dim is None else inputs[position].shape[dim]
        found = int(value) - more
        expected = 0 if symbol is None else sizes.setdefault(symbol, found)
        if expected != found:
            where = f"input {position}" if dim is None else f"dim {dim} of input {position}"
            raise SizesDiffer(f"{where} is {found + more} where {expected + more} was assumed")
    return sizes


def _declared(placeholder: Node) -> Iterator[tuple[int | None, sympy.Expr]]:
    """Sizes of an input by dim; an input that is a size itself has no dim."""
    value = placeholder.meta["val"]
    if isinstance(value, torch.Tensor):
        yield from ((d, expression(size)) for d, size in enumerate(value.shape))
    elif isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        yield None, expression(value)


def _linear(size: sympy.Expr) -> Iterator[tuple[sympy.Symbol | None, int]]:
    """The symbol of a size and the number added to it, if that is all there is to the size."""
    if size.is_Integer:
        yield None, int(size)
    if len(size.free_symbols) == 1:
        (symbol,) = size.free_symbols
        more = size - symbol
        if more.is_Integer:
            yield symbol, int(more)


def tests_of_sizes(facts: Facts) -> list[tuple[list[sympy.Symbol], Callable[..., bool]]]:
    """What capture assumed about sizes, as functions of the symbols that stand first in each entry."""
    known = {
        s for n in facts.nodes if n.op == "placeholder" for _, e in _declared(n) for s, _ in _linear(e) if s
    }
    found = []
    for guard in facts.guards:
        symbols = sorted(guard.free_symbols, key=str)
        if symbols and known.issuperset(symbols):
            found.append((symbols, _holds(compiled(symbols, guard))))
    return found


def _holds(test: Callable[..., Any]) -> Callable[..., bool]:
    """A guard that cannot be evaluated, as `B % (B // 2)` for one sample, does not hold."""

    def tested(*values: int) -> bool:
        try:
            return bool(test(*values))
        except ZeroDivisionError:
            return False

    return tested
