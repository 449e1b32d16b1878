"""Small wrong changes to a module's source: what a slip of the keyboard would make of it.

Each operator below looks at one node of the syntax tree and gives the texts that may stand in its place.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
TWINS = {"any": "all", "all": "any", "min": "max", "max": "min"}
# A literal with fewer entries is a pair or an argument list, and not a table.
TABLE = 3


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        path: of the module, from the root of the repository.
        line: where the change is.
        was, now: the text that was replaced, and by what.
        source: the whole module with the change.
    """

    path: str
    line: int
    was: str
    now: str
    source: str

    def __str__(self) -> str:
        short = lambda text: " ".join(text.split())[:60]  # noqa: E731
        return f"{self.path}:{self.line}: {short(self.was)!r} -> {short(self.now)!r}"


Operator = Callable[[ast.AST, str], Iterator[tuple[ast.AST, str]]]


def comparisons(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """A comparison the other way round."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (f"({text_of(n, source)})" for n in (node.left, node.comparators[0]))
        yield node, f"{left} {COMPARISONS[type(node.ops[0])]} {right}"


def conditions(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """A condition that never holds, or always; `and` for `or`; without `not`; one of its parts left out."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test, "False"
        yield node.test, "True"
    if isinstance(node, ast.BoolOp) and not _has_default(node):
        parts = [text_of(n, source) for n in node.values]
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, "(" + word.join(f"({p})" for p in parts) + ")"
        same = " and " if isinstance(node.op, ast.And) else " or "
        for k in range(len(parts)):
            yield node, "(" + same.join(f"({p})" for p in parts[:k] + parts[k + 1 :]) + ")"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({text_of(node.operand, source)})"


def _has_default(node: ast.BoolOp) -> bool:
    """True for `value or {}`: of a value that is there in any case nothing changes."""
    return ast.unparse(node.values[-1]) in ("{}", "[]", "()")


def entries(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """A table without one of its entries; a rule that is not registered for one of its ops."""
    if isinstance(node, (ast.Set, ast.List, ast.Tuple)) and len(node.elts) >= TABLE:
        opening, closing = {ast.Set: "{}", ast.List: "[]", ast.Tuple: "()"}[type(node)]
        for left_out in node.elts:
            kept = ", ".join(text_of(n, source) for n in node.elts if n is not left_out)
            yield node, f"{opening}{kept},{closing}"
    if isinstance(node, ast.Dict) and len(node.keys) >= TABLE and all(node.keys):
        items = zip(node.keys, node.values, strict=True)
        pairs = [f"{text_of(k, source)}: {text_of(v, source)}" for k, v in items]  # type: ignore[arg-type]
        for k in range(len(pairs)):
            yield node, "{" + ", ".join(pairs[:k] + pairs[k + 1 :]) + "}"


def statements(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """A call for its effect, or an error, that is left out."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if called or isinstance(node, (ast.Raise, ast.AugAssign)):
        yield node, "pass"


def numbers(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """One more, or the other truth value; the other of two functions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TWINS:
        yield node.func, TWINS[node.func.id]


OPERATORS: tuple[Operator, ...] = (comparisons, conditions, entries, statements, numbers)


def mutants_of(path: str, root: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its lines. Annotations and docstrings are left alone."""
    source = (root / path).read_text()
    tree = ast.parse(source)
    found = []
    for node in walk(tree):
        for operator in OPERATORS:
            for place, now in operator(node, source):
                was = text_of(place, source)
                if was != now:
                    changed = replaced(source, place, now)
                    found.append(Mutant(path, place.lineno, was, now, changed))  # type: ignore[attr-defined]
    return sorted(found, key=lambda m: m.line)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without annotations, asserts and what only checks types."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Assert) or (isinstance(child, ast.If) and _checks_types(child)):
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from walk(child)


def _checks_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def text_of(node: ast.AST, source: str) -> str:
    return ast.get_source_segment(source, node) or ast.unparse(node)


def replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with another text in the place of a node."""
    lines = source.splitlines(keepends=True)
    start, end = (
        _offset(lines, node.lineno, node.col_offset),
        _offset(  # type: ignore[attr-defined]
            lines,
            node.end_lineno,
            node.end_col_offset,  # type: ignore[attr-defined]
        ),
    )
    raw = source.encode()
    return (raw[:start] + text.encode() + raw[end:]).decode()


def _offset(lines: list[str], line: int, column: int) -> int:
    return sum(len(text.encode()) for text in lines[: line - 1]) + column
