"""A function with its loops along rows as calls of `scan`."""

from __future__ import annotations

import ast
import dis
import functools
import re
from collections.abc import Iterable
from types import CodeType
from typing import Any, NamedTuple

from .analysis import SCANNING, Loop, NotAStep, loops_of, step_of
from .forms import is_join
from .places import NAMES
from .source import located, source_of

PREFIX = "_streambp_"
BODY = re.compile(rf"{PREFIX}\d+_body")
_LOOP = dis.opmap["FOR_ITER"]


class Rewritten(NamedTuple):
    """What became of the loops of a function.

    Attributes:
        code: that does the same, with loops as calls of `scan` where they fit; None if none may fit.
        unrolled: the other loops, and why: lines of text.
    """

    code: CodeType | None
    unrolled: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def with_scans(code: CodeType) -> Rewritten:
    """The loops of a function as calls of `scan`."""
    if _LOOP not in code.co_code[::2] or not NAMES & set(code.co_names):
        return Rewritten(None)
    source = source_of(code)
    if source is None:
        return Rewritten(None, (f"{_place(code, code.co_firstlineno)}: the source is not known",))
    tree, found, unrolled = source.function, [], []
    for k, node in enumerate(loops_of(tree)):
        try:
            found.append(step_of(tree, node, f"{PREFIX}{k}_"))
        except NotAStep as error:
            unrolled.append(f"{_place(code, node.lineno)}: {error}")
    found = [x for x in found if not any(x is not y and _is_within(x.node, y.node) for y in found)]
    if not found:
        return Rewritten(None, tuple(unrolled))
    _Changed({id(x.node): (k, x) for k, x in enumerate(found)}).visit(tree)
    (own,) = ast.parse(f"from {__package__} import scanning as {SCANNING}").body
    tree.body.insert(0, located(own, tree.body[0]))
    return Rewritten(source.compiled(), tuple(unrolled))


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line}"


def _is_within(inner: ast.For, outer: ast.For) -> bool:
    return any(n is inner for s in outer.body for n in ast.walk(s))


class _Changed(ast.NodeTransformer):
    """Puts a choice between a scan and the loop in the place of each loop."""

    def __init__(self, loops: dict[int, tuple[int, Loop]]) -> None:
        self.loops = loops
        self.lists = [n for _, x in loops.values() for n in x.joined]

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        if id(node) not in self.loops:
            return self.generic_visit(node)
        return _choice(*self.loops[id(node)])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if is_join(node, self.lists):
            assert isinstance(node.func, ast.Attribute)
            joined = ast.Attribute(ast.Name(SCANNING, ast.Load()), "joined", ast.Load())
            node.args.insert(0, node.func)
            node.func = ast.copy_location(joined, node)
        return node


def _choice(number: int, loop: Loop) -> list[ast.stmt]:
    """The statements for a loop: a template that is parsed, with the parts of the loop put in."""
    own = f"{PREFIX}{number}_"
    values = [loop.count or ast.Constant(None), *(r.tensor for r in loop.rows.values())]
    names = [f"{own}count", *(f"{own}value_{k}" for k in range(len(loop.rows)))]
    read = _tuple(f"({name}, {row.dim})" for name, row in zip(names[1:], loop.rows.values(), strict=True))
    outs = _tuple(f"({w.name}, {w.dim})" for w in loop.written.values())
    carried, made = _tuple(loop.carried), _tuple([*loop.written, *loop.appended])
    scan = [
        f"def {own}body({own}first, {own}carried, {own}rows):",
        f"    {carried} = {own}carried" if loop.carried else "    pass",
        f"    {_tuple(loop.rows)} = {own}rows",
        f"    return {carried}, {made}",
        f"{own}carried, {own}made = {SCANNING}.scan({own}body, {carried}, {read}, {loop.has_first})",
        f"{carried} = {own}carried" if loop.carried else "pass",
        f"{made} = {own}made" if made != "()" else "pass",
        *(f"{w.name} = {SCANNING}.put({n}, {w.name}, {w.dim}, {w.keeps})" for n, w in loop.written.items()),
        *(f"{name} = ({SCANNING}.ROWS, {n})" for n, name in loop.appended.items()),
    ]
    lines = [f"{name} = _" for name in names]
    lines += [f"{name} = None" for name in loop.unbound]
    lines += [f"if {SCANNING}.fits({names[0]}, {read}, {carried}, {outs}):"]
    lines += [*(f"    {line}" for line in scan), "else:", "    pass", *(f"    del {n}" for n in loop.unbound)]
    statements = [located(s, loop.node) for s in ast.parse("\n".join(lines)).body]
    for statement, value in zip(statements, values, strict=False):
        statement.value = value  # type: ignore[attr-defined]
    choice: Any = statements[-1]
    choice.body[0].body[-1:-1] = loop.body
    # what the loop goes over is evaluated once
    given = {id(loop.iterated[n]): v for n, v in zip(loop.rows, names[1:], strict=True) if n in loop.iterated}
    _Named({**given, id(loop.count): names[0]}).visit(loop.node)
    choice.orelse.append(loop.node)
    return statements


class _Named(ast.NodeTransformer):
    """Puts variables in the place of expressions that have been evaluated."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:
        name = self.names.get(id(node))
        found = super().visit(node) if name is None else ast.Name(name, ast.Load())
        return ast.copy_location(found, node) if isinstance(node, ast.expr) else found


def _tuple(parts: Iterable[str]) -> str:
    """Python's text of a tuple."""
    return "(" + "".join(f"{p}, " for p in parts) + ")"
