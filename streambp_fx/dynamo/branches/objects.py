"""Variables of which nobody can tell whether a branch has given them another object.

Where a branch is not taken, a variable that its body assigns is the object from before. In the graph it is
another one, with the same values. Nothing can depend on that if the variable is the only name of that object:
it was made for the variable, and was not given to anybody since. All that is not known here is taken for a
second name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ..loops.names import LOOPS, around, following, names_in
from ..loops.source import located

TRACED = "_streambp_traced"
# Expressions of modules whose functions make tensors.
_MODULES = ("torch", "F", "nn.functional", "torch.nn.functional")
# What is asked of a tensor without keeping it.
_FACTS = ("shape", "dtype", "device", "ndim")
ORDER = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def is_only_name(tree: ast.FunctionDef, branch: ast.If, name: str) -> bool:
    """True if a variable that the body of a branch assigns is the only name of what it is before and behind.

    Args:
        tree: the function.
        branch: of it.
        name: the variable.
    """
    arguments = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    later = {id(n) for n in _later(tree, branch)}
    found = [n for n in names_in([tree]) if n.id == name and id(n) not in later]
    known = unshared([tree]) | {id(target) for target, _ in _made(tree)}
    known -= {id(r.value) for t in _finished(tree) for r in ast.walk(t) if isinstance(r, ast.Return)}
    return name not in arguments | _otherwise_bound(tree) and all(id(n) in known for n in found)


def _otherwise_bound(tree: ast.FunctionDef) -> set[str | None]:
    """Names of functions, classes, modules and errors within a function."""
    inner = [n for n in ast.walk(tree) if n is not tree]
    named = {getattr(n, "name", None) for n in inner}
    return named | {n.asname for n in inner if isinstance(n, ast.alias)}


def _finished(tree: ast.FunctionDef) -> list[ast.AST]:
    """Statements with a part that is run although the function has returned."""
    return [n for n in ast.walk(tree) if getattr(n, "finalbody", [])]


def _later(tree: ast.FunctionDef, branch: ast.If) -> Iterator[ast.AST]:
    """What is run behind a branch, and not before it."""
    outer = [s for s in around(tree.body, branch) if isinstance(s, LOOPS)]
    for statements in following(tree.body, outer[-1] if outer else branch):
        for nodes in (list(ast.walk(s)) for s in statements):
            yield from nodes if branch not in nodes else ()  # it may catch an error of the branch


def _made(tree: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Variables that are assigned a new tensor, and what makes it."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None and _makes(value):
            yield targets[0], value


def _makes(value: ast.expr) -> bool:
    """True for an operation, the call of a function of PyTorch, and that of a method of a tensor."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and not _gives_back(value)
    return isinstance(value, ast.BinOp) or (
        isinstance(value, ast.UnaryOp) and not isinstance(value.op, ast.Not)
    )


def _gives_back(call: ast.Call) -> bool:
    """True for a function that may return what it changes in place."""
    named = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return named.endswith("_") or any(k.arg in ("out", "inplace", None) for k in call.keywords)


def _is_of_torch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in _MODULES


def unshared(nodes: Iterable[ast.AST]) -> set[int]:
    """The places, by `id`, where a variable is read in a way that gives its object no other name."""
    found: set[int] = set()
    for node in (n for tree in nodes for n in ast.walk(tree)):
        found |= {id(n) for n in _read_by(node) if isinstance(n, ast.Name)}
    return found


def _read_by(node: ast.AST) -> list[ast.expr]:
    """What is read, and not kept, by a piece of a function itself."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Compare) and all(isinstance(op, ORDER) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Attribute):
        return [node.value] if node.attr in _FACTS and isinstance(node.ctx, ast.Load) else []
    if isinstance(node, ast.Return):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # a method that changes it
        method = node.value.func
        return [method.value] if isinstance(method, ast.Attribute) else []
    return _read_by_call(node) if isinstance(node, ast.Call) and not _gives_back(node) else []


def _read_by_call(call: ast.Call) -> list[ast.expr]:
    if _is_of_torch(call):
        return [*call.args, *(k.value for k in call.keywords)]
    return [call.func.value] if isinstance(call.func, ast.Attribute) else []


def with_checks(tree: ast.FunctionDef, names: Iterable[str]) -> None:
    """Have it checked, when the function is traced, that what makes tensors does so; in place.

    Args:
        tree: the function; `TRACED` is a name in it.
        names: the variables that are taken for the only names of their objects.
    """
    own, modules = set(names), dict[str, ast.expr]()
    made = {id(value) for target, value in _made(tree) if target.id in own}
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.Call) and _is_of_torch(node):
            modules[ast.unparse(node.func.value)] = node.func.value  # type: ignore[attr-defined]
        read = (n.id for n in _read_by(node) if isinstance(n, ast.Name))
        if id(node) in made or not own.isdisjoint(read):
            _check(node)
    if modules:
        (check,) = ast.parse(f"{TRACED}.of_torch({', '.join(modules)})").body
        tree.body.insert(0, check)


def _check(node: ast.AST) -> None:
    """Put a check around what must be a tensor, or a number: another object may keep what it is given."""
    if isinstance(node, ast.BinOp):
        node.left, node.right = _operand(node.left), _operand(node.right)
    elif isinstance(node, ast.UnaryOp):
        node.operand = _operand(node.operand)
    elif isinstance(node, ast.Compare):
        node.left = _operand(node.left)
        node.comparators = [_operand(c) for c in node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _is_of_torch(node):
        node.func.value = traced_call("tensor", node.func.value, node.func.value)


def _operand(value: ast.expr) -> ast.Call:
    return traced_call("operand", value, value)


def traced_call(function: str, operand: ast.expr, like: ast.AST) -> ast.Call:
    """A call of one of the functions of `traced`.

    Args:
        function: its name.
        operand: what it is given.
        like: where it stands.
    """
    call = located(ast.parse(f"{TRACED}.{function}(_)", mode="eval").body, like)
    assert isinstance(call, ast.Call)
    call.args = [operand]
    return call
