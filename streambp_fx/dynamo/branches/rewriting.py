"""A function with its branches on data as calls of a body that is always run."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Iterator
from types import CodeType

from ..loops.names import captured_names, leaves, names_in, stores
from ..loops.source import located, source_of
from .chosen import with_all_entries
from .objects import TRACED, is_only_name, unshared, with_checks

PREFIX = "_streambp_branch_"
# Statements that a body may consist of. Others may have effects.
PLAIN = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, ast.If, ast.For)
# Expressions that mean something else in a function of its own, or have effects.
OTHER = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda)
OWN_FRAME = {"super", "__class__"}
# What asks for the names of variables.
OWN_NAMES = {"locals", "vars", "dir", "eval", "exec"}


class NotABranch(Exception):
    """A branch cannot be run whatever the answer is."""


@functools.lru_cache(maxsize=4096)
def with_branches(code: CodeType) -> CodeType | None:
    """The code of a function that runs the bodies of its branches on data; None if it has no such branch."""
    source = source_of(code)
    if source is None:
        return None
    tree = source.function
    tree.body = _without_skips(tree.body)
    with_all_entries(tree, PREFIX)
    if any(isinstance(n, (ast.Global, ast.Nonlocal, ast.Match)) for n in ast.walk(tree)):
        return None
    if OWN_NAMES & {n.id for n in names_in([tree])}:
        return None
    captured = captured_names(tree)
    found = [b for b in _branches(tree) if _why_not(b) is None and captured.isdisjoint(_stored(b))]
    assigned = {id(b): _assigned(tree, b) for b in found}
    found = [b for b in found if all(is_only_name(tree, b, name) for name in assigned[id(b)][0])]
    if not found:
        return None
    with_checks(tree, {name for b in found for name in assigned[id(b)][0]})
    _Changed({id(b): assigned[id(b)] for b in found}).visit(tree)
    (own,) = ast.parse(f"from {__package__} import traced as {TRACED}").body
    tree.body.insert(0, located(own, tree.body[0]))
    return source.compiled()


def _stored(branch: ast.If) -> set[str]:
    """Variables that a body assigns, or whose tensors it changes."""
    return set().union(*map(stores, branch.body), _changed_in_place(branch.body))


def _branches(tree: ast.AST) -> Iterator[ast.If]:
    """The branches of a function, not those of functions within it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and not node.orelse:
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _branches(node)


def _without_skips(body: list[ast.stmt], of_loop: bool = False) -> list[ast.stmt]:
    """Statements in which `if skip: continue` with what follows in a loop is `if not skip:`."""
    found: list[ast.stmt] = []
    for k, statement in enumerate(body):
        rest = body[k + 1 :]
        if of_loop and rest and isinstance(statement, ast.If) and _only_continues(statement):
            test = ast.copy_location(ast.UnaryOp(ast.Not(), statement.test), statement.test)
            taken = ast.If(test, _without_skips(rest, of_loop=True), [])
            return [*found, ast.copy_location(taken, statement)]
        for name, value in ast.iter_fields(statement):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                loops = name == "body" and isinstance(statement, (ast.For, ast.While))
                setattr(statement, name, _without_skips(value, loops))
        found.append(statement)
    return found


def _only_continues(branch: ast.If) -> bool:
    return not branch.orelse and len(branch.body) == 1 and isinstance(branch.body[0], ast.Continue)


def _why_not(branch: ast.If) -> str | None:
    """Why the body of a branch cannot be a function of its own; None if it can."""
    try:
        _check(branch.body)
        _changed_in_place(branch.body)
    except NotABranch as error:
        return str(error)
    return None


def _check(body: list[ast.stmt], within_loop: bool = False) -> None:
    for statement in body:
        ends = isinstance(statement, (ast.Continue, ast.Break)) and within_loop
        if not (isinstance(statement, PLAIN) or ends or _name_changed_by_method(statement)):
            raise NotABranch(f"line {statement.lineno} may have an effect")
        for target in _targets(statement):
            if not isinstance(_root(target), ast.Name) or isinstance(target, ast.Attribute):
                raise NotABranch(f"line {statement.lineno} changes an object")
        if any(isinstance(n, OTHER) for n in ast.walk(statement)):
            raise NotABranch(f"line {statement.lineno} is no plain expression")
        if OWN_FRAME & {n.id for n in names_in([statement])}:
            raise NotABranch(f"line {statement.lineno} asks for the frame that it is in")
        if isinstance(statement, (ast.If, ast.For)):
            loops = within_loop or isinstance(statement, ast.For)
            _check(statement.body, loops)
            _check(statement.orelse, within_loop)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [statement.target]
    found = (leaf for target in targets for leaf in leaves(target))
    return [leaf.value if isinstance(leaf, ast.Starred) else leaf for leaf in found]


def _root(target: ast.expr) -> ast.expr:
    """`x` of `x[i][j]`."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target


def _name_changed_by_method(statement: ast.stmt) -> str | None:
    """`x` of a statement `x.add_(y)`."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    method = statement.value.func
    if not isinstance(method, ast.Attribute) or not isinstance(method.value, ast.Name):
        return None
    in_place = method.attr.endswith("_") and not method.attr.startswith("_")
    return method.value.id if in_place else None


def _changed_in_place(body: list[ast.stmt]) -> list[str]:
    """Variables whose tensors the statements change.

    Raises:
        NotABranch: one of them is also given another value, or another name.
    """
    changed, given = dict[str, None](), set[str]()
    for statement in (n for s in body for n in ast.walk(s) if isinstance(n, ast.stmt)):
        name = _name_changed_by_method(statement)
        if name is not None:
            changed[name] = None
        for target in _targets(statement):
            root = _root(target)
            assert isinstance(root, ast.Name)
            if root is not target or isinstance(statement, ast.AugAssign):
                changed[root.id] = None
            else:
                given.add(root.id)
    twice = given & set(changed)
    made = {n for n in twice if _is_made_within(body, n)}
    if twice - made:
        raise NotABranch(f"{', '.join(sorted(twice - made))} is changed in place and assigned")
    known = unshared(body)
    if any(n.id in changed and n.id not in made and id(n) not in known for n in names_in(body)):
        raise NotABranch("what is changed in place gets a second name")
    return [n for n in changed if n not in made]


def _is_made_within(body: list[ast.stmt], name: str) -> bool:
    """True if the first statement that mentions a variable assigns it: it is the body's own."""
    for statement in body:
        if any(n.id == name for n in names_in([statement])):
            own = isinstance(statement, (ast.Assign, ast.AnnAssign))
            reads = any(n.id == name and isinstance(n.ctx, ast.Load) for n in names_in([statement]))
            return own and not reads and any(t.id == name for t in _plain(_targets(statement)))
    return False


def _plain(targets: list[ast.expr]) -> list[ast.Name]:
    return [t for t in targets if isinstance(t, ast.Name)]


class _Changed(ast.NodeTransformer):
    """Puts a choice between the branch and its body in the place of each branch.

    Args:
        assigned: by branch, `id`, the variables of `_assigned`.
    """

    def __init__(self, assigned: dict[int, tuple[list[str], list[str]]]) -> None:
        self.numbers, self.assigned = itertools.count(), assigned

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        names = self.assigned.get(id(node))
        return (
            node
            if names is None or not any(names)
            else _choice(f"{PREFIX}{next(self.numbers)}_", node, *names)
        )


def _assigned(tree: ast.FunctionDef, branch: ast.If) -> tuple[list[str], list[str]]:
    """Variables that the body assigns and somebody may read later, and those whose tensors it changes."""
    changed, inner = _changed_in_place(branch.body), {n for s in branch.body for n in ast.walk(s)}
    outside = {n.id for n in names_in([tree]) if n not in inner and not isinstance(n.ctx, ast.Store)}
    given = [
        n
        for n in sorted(_stored(branch) - set(changed))
        if n in outside or not _is_made_within(branch.body, n)
    ]
    return given, changed


def _choice(prefix: str, branch: ast.If, given: list[str], changed: list[str]) -> list[ast.stmt]:
    """The statements for a branch: a template that is parsed, with the parts of the branch put in."""
    test, negated = branch.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, not negated
    names = [*given, *changed]
    listed = "(" + "".join(f"{n}, " for n in names) + ")"
    lines = [
        f"{prefix}asked = _",
        f"{prefix}predicate = {TRACED}.predicate({prefix}asked, {negated})",
        f"if {prefix}predicate is None:",
        f"    if {'not ' if negated else ''}{prefix}asked:",
        "        pass",
        "else:",
        f"    def {prefix}body({', '.join(names)}):",
        *(f"        {n} = {TRACED}.own({n})" for n in changed),
        "        pass",
        f"        return {listed}",
        f"    {prefix}taken = {prefix}body({', '.join(names)})",
        f"    {prefix}made = {TRACED}.results({prefix}predicate, {prefix}taken, {listed}, {len(given)})",
        *(f"    {n} = {prefix}made[{k}]" for k, n in enumerate(given)),
        *(f"    {n}.copy_({prefix}made[{len(given) + k}])" for k, n in enumerate(changed)),
    ]
    statements = [located(s, branch) for s in ast.parse("\n".join(lines)).body]
    asked, _, choice = statements
    asked.value = test  # type: ignore[attr-defined]
    choice.body[0].body = copy.deepcopy(branch.body)  # type: ignore[attr-defined]
    function = choice.orelse[0]  # type: ignore[attr-defined]
    function.body[len(changed) : len(changed) + 1] = branch.body
    return statements
