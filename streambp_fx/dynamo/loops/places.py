"""Where rows are taken and written: indices with the variable of a loop."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of a tensor that the body of a loop reads.

    Attributes:
        tensor: an expression that no statement of the body changes: a variable, or an attribute of one.
        dim: of the rows; negative, from the last.
    """

    tensor: ast.expr
    dim: int


@dataclass(frozen=True)
class Place:
    """Where a row is in an index.

    Attributes:
        dim: the dim of the rows; negative, from the last.
        keeps: it stays a dim, of one entry.
        rest: the index of the other dims.
    """

    dim: int
    keeps: bool
    rest: list[ast.expr]


def place_of(index: ast.expr, variable: str | None) -> Place | None:
    """The place of a loop's variable in an index of numbers and slices; None if it is not one row's."""
    if variable is None:
        return None
    entries = list(index.elts) if isinstance(index, ast.Tuple) else [index]
    places = [k for k, e in enumerate(entries) if _is_row(e, variable)]
    if len(places) != 1:
        return None
    place = places[0]
    if not all(map(_is_plain, entries[:place] + entries[place + 1 :])):
        return None
    dots = [k for k, e in enumerate(entries) if _is_dots(e)]
    if len(dots) > 1:
        return None
    dim = place - len(entries) if dots and dots[0] < place else place
    keeps = isinstance(entries[place], ast.Slice)
    return Place(dim, keeps, entries[:place] + [ast.Slice()] * keeps + entries[place + 1 :])


def _is_row(entry: ast.expr, variable: str) -> bool:
    """`t`, or `t : t + 1`."""
    if not isinstance(entry, ast.Slice):
        return _is_variable(entry, variable)
    upper = entry.upper
    return (
        entry.step is None
        and _is_variable(entry.lower, variable)
        and isinstance(upper, ast.BinOp)
        and isinstance(upper.op, ast.Add)
        and _is_variable(upper.left, variable)
        and integer(upper.right) == 1
    )


def _is_variable(node: ast.expr | None, variable: str) -> bool:
    return isinstance(node, ast.Name) and node.id == variable


def _is_dots(entry: ast.expr) -> bool:
    return isinstance(entry, ast.Constant) and entry.value is Ellipsis


def _is_plain(entry: ast.expr) -> bool:
    if isinstance(entry, ast.Slice):
        return all(p is None or integer(p) is not None for p in (entry.lower, entry.upper, entry.step))
    return _is_dots(entry) or integer(entry) is not None


def is_all(entry: ast.expr) -> bool:
    """True for `:` and `...`."""
    whole = isinstance(entry, ast.Slice) and entry.lower is entry.upper is entry.step is None
    return whole or _is_dots(entry)


def integer(node: ast.expr) -> int | None:
    """The value of a literal, as a dim or an index; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = integer(node.operand)
        return None if found is None else -found
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def root(node: ast.expr) -> str | None:
    """The variable of `a` or `a.b.c`; None for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@dataclass(frozen=True)
class Header:
    """What a loop goes over.

    Attributes:
        count: how many rows; None: those of `row`.
        index: the variable with the number of the row, if there is one.
        row: if it goes over the rows of a tensor, these, and the variable with one of them.
    """

    count: ast.expr | None
    index: str | None
    row: tuple[str, Row] | None = None


def header_of(loop: ast.For) -> Header | None:
    """`range(n)`, `x.unbind(d)` or `enumerate(x.unbind(d))`; None if a loop goes over something else."""
    call, target, index = loop.iter, loop.target, None
    if not isinstance(call, ast.Call):
        return None
    if _calls(call, "range") and isinstance(target, ast.Name) and not call.keywords:
        given = call.args[1:] if len(call.args) == 2 and integer(call.args[0]) == 0 else call.args
        return Header(given[0], target.id) if len(given) == 1 else None
    if _calls(call, "enumerate") and len(call.args) == 1 and not call.keywords:
        pair = target.elts if isinstance(target, ast.Tuple) else []
        if len(pair) != 2 or not isinstance(pair[0], ast.Name) or not isinstance(call.args[0], ast.Call):
            return None
        index, target, call = pair[0].id, pair[1], call.args[0]
    dim = _unbound_dim(call)
    if dim is None or not isinstance(target, ast.Name) or target.id == index:
        return None
    assert isinstance(call.func, ast.Attribute)
    return (
        None if root(call.func.value) is None else Header(None, index, (target.id, Row(call.func.value, dim)))
    )


def _calls(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _unbound_dim(call: ast.Call) -> int | None:
    """The dim of `x.unbind(dim)`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "unbind":
        return None
    given = [*call.args, *(k.value for k in call.keywords if k.arg == "dim")]
    if len(given) != len(call.args) + len(call.keywords) or len(given) > 1:
        return None
    return integer(given[0]) if given else 0
