"""What a body may do with the number of a row: take rows of tensors, and ask whether it is the first."""

from __future__ import annotations

import ast
from typing import Any

from .places import Place, Row, integer, is_all, place_of, root

# What `t` is compared with, and what that says of the first row, for t from 0 on.
_SAYS = {(ast.Eq, 0): True, (ast.LtE, 0): True, (ast.Lt, 1): True, (ast.NotEq, 0): False, (ast.Gt, 0): False,
         (ast.GtE, 1): False}  # fmt: skip
_TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def compared(node: ast.Compare, index: str | None) -> bool | None:
    """Whether a comparison is true for the first row and false for others (True), or the other way round.

    Args:
        node: the comparison.
        index: the variable with the number of the row.

    Returns:
        None, if it says something else.
    """
    if len(node.ops) != 1:
        return None
    left, kind, right = node.left, type(node.ops[0]), node.comparators[0]
    if not is_index(left, index):
        left, kind, right = right, _TURNED.get(kind, kind), left
    number = integer(right)
    return None if number is None or not is_index(left, index) else _SAYS.get((kind, number))


def told(test: ast.expr, index: str | None) -> bool | None:
    """As `compared`, for what is asked in an `if`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        other = told(test.operand, index)
        return None if other is None else not other
    if isinstance(test, ast.Compare):
        return compared(test, index)
    return False if is_index(test, index) else None


def rows_of(loop: ast.For, index: str | None) -> set[tuple[str, int]]:
    """The tensors of which a loop takes rows, as text, and the dim of these."""
    subscripts = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Subscript)]
    places = [(n, place_of(n.slice, index)) for n in subscripts]
    return {(ast.dump(n.value), p.dim) for n, p in places if p is not None}


class OfTheFirst(ast.NodeTransformer):
    """Where only the first row comes to, `x[:, 0]` is `x[:, t]`.

    Args:
        index: the variable with the number of the row.
        rows: as `rows_of` says them.
    """

    def __init__(self, index: str | None, rows: set[tuple[str, int]]) -> None:
        self.index, self.rows = index, rows

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """An index of numbers."""
        self.generic_visit(node)
        entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for k, entry in enumerate(entries):
            if integer(entry) == 0 and self.index is not None:
                parts = [*entries[:k], ast.Name(self.index, ast.Load()), *entries[k + 1 :]]
                made = ast.Tuple(parts, ast.Load()) if len(parts) > 1 else parts[0]
                place = place_of(made, self.index)
                if place is not None and (ast.dump(node.value), place.dim) in self.rows:
                    node.slice = made
                    return ast.fix_missing_locations(node)
        return node


def is_index(node: ast.expr, index: str | None) -> bool:
    """True for the variable with the number of the row."""
    return index is not None and isinstance(node, ast.Name) and node.id == index


def asked(is_first: bool, name: str, like: ast.expr) -> ast.expr:
    """`name`, or `not name`."""
    made: ast.expr = ast.Name(name, ast.Load())
    made = made if is_first else ast.UnaryOp(ast.Not(), made)
    return ast.fix_missing_locations(ast.copy_location(made, like))


class TakenRows(ast.NodeTransformer):
    """Puts the name of a row where a row is taken."""

    def __init__(self, analysis: Any) -> None:
        self.analysis = analysis

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """A row that is taken."""
        header = self.analysis.header
        place = None if header is None else place_of(node.slice, header.index)
        if place is None or root(node.value) is None:
            return self.generic_visit(node)
        made = self._row(self.analysis.unchanged(Row(node.value, place.dim)), place)
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Whether a row is the first."""
        is_first = compared(node, self._index)
        return self.generic_visit(node) if is_first is None else self._asked(is_first, node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """The same, as `a if t else b`."""
        (node.body,), (node.orelse,) = self.analysis.of_the_first(node.test, [node.body], [node.orelse])
        node.test = self.tested(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def tested(self, node: ast.expr) -> ast.expr:
        """A part of which only the truth counts: `t`, `not t`, `t and other`."""
        if is_index(node, self._index):
            return self._asked(False, node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self.tested(node.operand)
        elif isinstance(node, ast.BoolOp):
            node.values = [self.tested(v) for v in node.values]
        else:
            node = self.visit(node)
        return node

    @property
    def _index(self) -> str | None:
        return None if self.analysis.header is None else self.analysis.header.index

    def _asked(self, is_first: bool, like: ast.expr) -> ast.expr:
        self.analysis.has_first = True
        return asked(is_first, f"{self.analysis.prefix}first", like)

    def _row(self, row: Row, place: Place) -> ast.expr:
        made: ast.expr = ast.Name(self._name(row), ast.Load())
        if place.keeps:
            made = ast.Call(ast.Attribute(made, "unsqueeze", ast.Load()), [ast.Constant(place.dim)], [])
        if not all(map(is_all, place.rest)):
            made = ast.Subscript(made, ast.Tuple(place.rest, ast.Load()), ast.Load())
        return made

    def _name(self, row: Row) -> str:
        rows = self.analysis.rows
        key = (ast.dump(row.tensor), row.dim)
        found = next((n for n, r in rows.items() if (ast.dump(r.tensor), r.dim) == key), None)
        name = found or f"{self.analysis.prefix}row_{len(rows)}"
        rows[name] = row
        return name
