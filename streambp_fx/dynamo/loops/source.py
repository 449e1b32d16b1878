"""The source of a function as a syntax tree, and code of such a tree."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TypeVar


@dataclass(frozen=True)
class Source:
    """A function within the module that it is written in.

    Attributes:
        module: the tree of the whole file. How a function is compiled depends on what is around it.
        function: that of the function.
        code: what it was compiled to.
    """

    module: ast.Module
    function: ast.FunctionDef
    code: CodeType

    def compiled(self) -> CodeType | None:
        """The code of the function as its tree is now; None if there is none that fits its closure."""
        tree, file = ast.fix_missing_locations(self.module), self.code.co_filename
        module = compile(tree, file, "exec", dont_inherit=True)
        found = [c for c in _inner(module) if _place(c) == _place(self.code)]
        same = len(found) == 1 and found[0].co_freevars == self.code.co_freevars
        return found[0] if same else None


def source_of(code: CodeType) -> Source | None:
    """The source that some code was compiled from; None if that is not known for sure.

    The source must compile to the same code: a file may have been changed since.
    """
    try:
        module = ast.parse("".join(inspect.findsource(code)[0]))
        functions = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == code.co_name]
        functions = [n for n in functions if _first_line(n) == code.co_firstlineno]
        source = Source(module, functions[0], code) if len(functions) == 1 else None
        made = None if source is None else source.compiled()
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return source if made is not None and _is_same(made, code) else None


T = TypeVar("T", bound=ast.AST)


def located(tree: T, like: ast.AST) -> T:
    """A new piece of a tree, in the place of another."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            ast.copy_location(node, like)
    return tree


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _inner(code: CodeType) -> Iterator[CodeType]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield value
            yield from _inner(value)


_PARTS = (
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount",
    "co_posonlyargcount", "co_kwonlyargcount",
)  # fmt: skip


def _is_same(made: CodeType, code: CodeType) -> bool:
    """True if two pieces of code do the same with the same names and constants."""
    if any(getattr(made, p) != getattr(code, p) for p in _PARTS):
        return False
    same = len(made.co_consts) == len(code.co_consts)
    return same and all(map(_is_same_constant, made.co_consts, code.co_consts))


def _is_same_constant(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return a.co_name == b.co_name and _is_same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)
