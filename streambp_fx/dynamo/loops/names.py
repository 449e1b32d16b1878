"""Which names the statements of a function read and assign, and in which order they may run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

LOOPS = (ast.For, ast.While)
# After these the statement behind is not the next, and these may swallow an error.
_LEAVING = (ast.Break, ast.Continue, ast.Raise)
_CATCHING = (ast.Try, ast.With, *([ast.TryStar] if hasattr(ast, "TryStar") else []))


def names_in(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """All variables in some trees."""
    for node in nodes:
        yield from (n for n in ast.walk(node) if isinstance(n, ast.Name))


def loads(node: ast.AST) -> set[str]:
    """Names that are read."""
    return {n.id for n in names_in([node]) if not isinstance(n.ctx, ast.Store)}


def stores(node: ast.AST) -> set[str]:
    """Names that are assigned, or deleted."""
    return {n.id for n in names_in([node]) if not isinstance(n.ctx, ast.Load)}


def captured_names(tree: ast.FunctionDef) -> set[str]:
    """Variables that functions and generators within a function mention, which may run later."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
    inner = (n for n in ast.walk(tree) if isinstance(n, functions) and n is not tree)
    return {n.id for n in names_in(inner)}


def leaves(target: ast.expr) -> Iterator[ast.expr]:
    """What is assigned by a target: itself, or the parts of a tuple."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from leaves(element)
    else:
        yield target


def read_first(body: Iterable[ast.stmt], assigned: set[str]) -> tuple[set[str], set[str]]:
    """What statements may read before they assign it, and what they have assigned at the end in any case.

    Args:
        body: statements.
        assigned: names that are assigned before.
    """
    read, after = _reads_first(body, assigned)
    return {n.id for n in read}, after


def _reads_first(body: Iterable[ast.stmt], assigned: set[str]) -> tuple[list[ast.Name], set[str]]:
    """The same, with the places where they are read."""
    read: list[ast.Name] = []
    assigned = set(assigned)

    def note(node: ast.AST, kind: type = ast.Store) -> None:
        read.extend(n for n in names_in([node]) if not isinstance(n.ctx, kind) and n.id not in assigned)

    for statement in body:
        if isinstance(statement, ast.If):
            note(statement.test)
            parts = [_reads_first(part, assigned) for part in (statement.body, statement.orelse)]
            read += parts[0][0] + parts[1][0]
            assigned = parts[0][1] & parts[1][1]
        elif isinstance(statement, ast.For):
            note(statement.iter)
            read += _reads_first(statement.body, assigned | stores(statement.target))[0]
            read += _reads_first(statement.orelse, assigned)[0]
        else:
            note(statement)
            if isinstance(statement, ast.AugAssign):
                note(statement.target, ast.Load)
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and statement.value:
                targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
                assigned = assigned.union(*map(stores, targets))
    return read, assigned


def read_behind(body: list[ast.stmt], loop: ast.stmt) -> set[str]:
    """What may be read after a loop before it is assigned anew."""
    read: set[str] = set()
    for statements in reversed(following(body, loop)):
        found, assigned = read_first(statements, set())
        read = found | (read if _may_end_early(body, loop, statements) else read - assigned)
    return read


def reads_behind(body: list[ast.stmt], loop: ast.stmt, name: str) -> list[ast.Name]:
    """Where a variable may be read after a loop before it is assigned anew."""
    read: list[ast.Name] = []
    for statements in following(body, loop):
        found, assigned = _reads_first(statements, set())
        read += [n for n in found if n.id == name]
        if name in assigned and not _may_end_early(body, loop, statements):
            break
    return read


def _may_end_early(body: list[ast.stmt], loop: ast.stmt, statements: list[ast.stmt]) -> bool:
    """True if what stands behind some statements after a loop may run without all of them."""
    leaves_them = any(isinstance(n, _LEAVING) for s in statements for n in ast.walk(s))
    return leaves_them or any(isinstance(s, _CATCHING) for s in around(body, loop))


def _blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly within a statement."""
    for _, value in ast.iter_fields(statement):
        if not isinstance(value, list) or not value:
            continue
        if isinstance(value[0], ast.stmt):
            yield value
        else:  # handlers of exceptions, cases
            for part in value:
                yield from _blocks(part) if isinstance(part, ast.AST) else ()


def following(body: list[ast.stmt], statement: ast.stmt) -> list[list[ast.stmt]]:
    """What is run after a statement: the rest of its block, then of the block around that, and so on.

    A loop around it is run again, and what catches an error may be run.
    """
    return _behind(body, statement) or []


def _behind(body: list[ast.stmt], loop: ast.stmt) -> list[list[ast.stmt]] | None:
    """The same; None if it is not in the body."""
    for k, statement in enumerate(body):
        if statement is loop:
            return [body[k + 1 :]]
        for block in _blocks(statement):
            found = _behind(block, loop)
            if found is not None:
                again: list[list[ast.stmt]] = (
                    [[statement]] if isinstance(statement, (*LOOPS, *_CATCHING)) else []
                )
                return [*found, *again, body[k + 1 :]]
    return None


def before(body: list[ast.stmt], loop: ast.stmt) -> list[ast.stmt] | None:
    """The statements before a loop in its own block, the last one first; None if the loop is in no block."""
    for k, statement in enumerate(body):
        if statement is loop:
            return body[:k][::-1]
        for block in _blocks(statement):
            found = before(block, loop)
            if found is not None:
                return found
    return None


def around(body: list[ast.stmt], loop: ast.stmt) -> list[ast.stmt]:
    """The statements that a loop stands in, the inner ones first."""
    for statement in body:
        for block in _blocks(statement):
            if loop in block:
                return [statement]
            found = around(block, loop)
            if found:
                return [*found, statement]
    return []


def assigned(name: str, statement: ast.stmt) -> ast.expr | None:
    """What `name = value` or `name, other = value, another` assigns to one name, and to no other."""
    if isinstance(statement, ast.AnnAssign):
        return (
            statement.value
            if isinstance(statement.target, ast.Name) and statement.target.id == name
            else None
        )
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    else:
        pairs = [(target, value)]
    found = [v for t, v in pairs if isinstance(t, ast.Name) and t.id == name]
    return found[0] if len(found) == 1 else None
