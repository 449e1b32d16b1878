"""Which loops of a function go along the rows of tensors with a state, read from its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .forms import (
    added,
    as_assignment,
    assigned_names,
    changed_by,
    containers_of,
    is_fresh,
    is_identity,
    is_join,
    is_made_before,
    read_for_facts,
)
from .names import (
    LOOPS,
    around,
    leaves,
    names_in,
    read_behind,
    read_first,
    reads_behind,
    stores,
)  # fmt: skip
from .places import Iterated, Row, header_of, is_all, place_of, root
from .row_numbers import OfTheFirst, TakenRows, rows_of, told

# Names that have to mean what they always do.
OWN = {"range", "enumerate", "zip", "torch", "list", "dict", "len", "tuple", "reversed"}
# The module `scanning`, in the new code.
SCANNING = "_streambp_scanning"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp,
           ast.DictComp, ast.GeneratorExp)  # fmt: skip
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.For, ast.Expr, ast.Pass)
_EXPRESSIONS = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_MIRRORS = {"locals", "vars", "eval", "exec", "dir", "globals"}


class NotAStep(Exception):
    """A loop is no step from row to row, or nobody can tell."""


@dataclass(frozen=True)
class Written:
    """A tensor made before the loop, of which the body writes one row.

    Attributes:
        name: of the variable.
        dim: of the rows.
        keeps: a row is written as a slice of one entry, and not as an element.
    """

    name: str
    dim: int
    keeps: bool


@dataclass(frozen=True)
class Loop:
    """A loop whose body is a step.

    Attributes:
        node: the loop.
        count: how many rows it goes over; None: those that the first of `rows` has.
        iterated: what it goes over, if that are tensors, by the name of a row.
        rows: what is read of it, by the name of a row in the new body.
        carried: variables that go from row to row.
        written: tensors of which a row is written, by the name of the row in the new body.
        appended: lists to which something is appended, likewise.
        joined: where these lists are read.
        body: the new body.
        has_first: it asks whether a row is the first.
        unbound: carried variables that nothing is assigned to before.
    """

    node: ast.For
    count: ast.expr | None
    iterated: dict[str, ast.expr]
    rows: dict[str, Row]
    carried: list[str]
    written: dict[str, Written]
    appended: dict[str, str]
    joined: list[ast.Name]
    body: list[ast.stmt]
    has_first: bool
    unbound: list[str]


def loops_of(tree: ast.FunctionDef) -> Iterator[ast.For]:
    """The loops of a function that may be along rows."""
    if any(isinstance(n, (ast.Global, ast.Nonlocal, *_EXPRESSIONS)) for n in ast.walk(tree)):
        return
    scopes = [s for s in ast.walk(tree) if isinstance(s, _SCOPES) and s is not tree]
    inner = {id(n) for s in scopes for n in ast.walk(s)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and id(node) not in inner and not node.orelse and header_of(node, tree):
            yield node


def step_of(tree: ast.FunctionDef, loop: ast.For, prefix: str) -> Loop:
    """What a loop does with one row.

    Args:
        tree: the function.
        loop: one of `loops_of` it.
        prefix: of new names.

    Raises:
        NotAStep: it is no step from row to row.
    """
    return _Analysis(tree, loop, prefix).found()


@dataclass
class _Analysis:
    tree: ast.FunctionDef
    loop: ast.For
    prefix: str
    rows: dict[str, Row] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)
    appended: dict[str, str] = field(default_factory=dict)
    joined: list[ast.Name] = field(default_factory=list)
    has_first: bool = False

    def found(self) -> Loop:
        self.header = header_of(self.loop, self.tree)
        assert self.header is not None
        self.targets, self.stored = stores(self.loop.target), set[str]().union(*map(stores, self.loop.body))
        self.containers = containers_of(self.tree, self.loop)
        self.changed = {n for s in self.loop.body for x in ast.walk(s) if (n := self._changed(x))}
        self.stored |= self.containers | self.changed
        self._refuse_kinds()
        self.rows |= {x.name: x.row for x in self.header.rows}
        body = [_with_its_dim(x, self.loop) for x in self.header.rows if x.keeps]
        body += [self._statement(s) for s in self.loop.body]
        self._refuse_scopes()
        self._refuse_changes()
        later = read_behind(self.tree.body, self.loop)
        if later & self.targets or any(n.id == self.header.index for n in names_in(body)):
            raise NotAStep("it reads the number of the row other than to take a row")
        first = read_first(body, set(self.rows))[0]
        carried = sorted(n for n in self.stored if n in first or n in later)
        if not self.rows or not (self.written or self.appended or set(carried) & later):
            raise NotAStep("it reads no rows, or nothing becomes of them")
        iterated = {x.name: x.row.tensor for x in self.header.rows}
        made = self.written, self.appended, self.joined
        more = self.has_first, self._unbound(carried)
        return Loop(self.loop, self.header.count, iterated, self.rows, carried, *made, body, *more)

    def _unbound(self, carried: Sequence[str]) -> list[str]:
        """Of variables that are carried, those that only the loop assigns: the first row does it."""
        own = {id(n) for n in ast.walk(self.loop)}
        bound = {a.arg for a in ast.walk(self.tree.args) if isinstance(a, ast.arg)}
        bound |= {n.id for n in names_in(self.tree.body) if id(n) not in own and isinstance(n.ctx, ast.Store)}
        found = [n for n in carried if n not in bound]
        if found and any(isinstance(s, LOOPS) for s in around(self.tree.body, self.loop)):
            raise NotAStep("the last round of a loop around it may have assigned what it carries")
        return found

    def _refuse_kinds(self) -> None:
        for node in (n for s in self.loop.body for n in ast.walk(s)):
            if isinstance(node, (*_SCOPES, *_EXPRESSIONS)):
                raise NotAStep("it has a function or a comprehension of its own")
            if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
                raise NotAStep(f"it has a statement of the kind {type(node).__name__}")
        if self.stored & self.targets:
            raise NotAStep("it assigns the loop's variable")
        if not all(isinstance(s, (ast.If, ast.For, ast.While)) for s in around(self.tree.body, self.loop)):
            raise NotAStep("it stands in a statement that may catch an error or end something")
        outer = (n for s in around(self.tree.body, self.loop) for n in ast.walk(s))
        if any(isinstance(n, (ast.Break, ast.Continue)) for n in outer):
            raise NotAStep("it stands in a loop that may end early")
        if any(isinstance(n, ast.Compare) and is_identity(n) for s in self.loop.body for n in ast.walk(s)):
            raise NotAStep("it asks which object a value is")
        if {"super", "next"} & {n.id for n in names_in(self.loop.body)}:
            raise NotAStep("it calls super(), or takes the next of something")
        if _MIRRORS & {n.id for n in names_in(self.tree.body)} or OWN & assigned_names(self.tree):
            raise NotAStep("the function looks at its own variables, or has a range of its own")

    def _refuse_scopes(self) -> None:
        """Functions within the function must not know of what the loop assigns."""
        own = self.stored | self.targets | {w.name for w in self.written.values()} | {*self.appended.values()}
        scopes = [n for n in ast.walk(self.tree) if isinstance(n, _SCOPES) and n is not self.tree]
        if own & {n.id for n in names_in(scopes)}:
            raise NotAStep("a function or a comprehension elsewhere reads what it assigns")

    def _refuse_changes(self) -> None:
        """What the loop reads, carries or makes must not be changed in place elsewhere: entries of a list are
        the values themselves, or views of what is read."""
        own = self.stored | set(self.rows) | {n for r in self.rows.values() if (n := root(r.tensor))}
        inner = {id(n) for n in ast.walk(self.loop)}
        for node in (n for n in ast.walk(self.tree) if id(n) not in inner):
            changed: ast.expr | None = node.target if isinstance(node, ast.AugAssign) else None
            if isinstance(node, ast.Attribute) and node.attr.endswith("_"):
                changed = node.value
            if changed is not None and own & {n.id for n in names_in([changed])}:
                raise NotAStep("what it reads or makes is changed in place elsewhere")

    def unchanged(self, row: Row) -> Row:
        if not isinstance(row.tensor, ast.Name):
            raise NotAStep("it takes rows of something other than a variable")
        if root(row.tensor) in self.stored:
            raise NotAStep("it takes rows of what it assigns")
        return row

    def _statement(self, statement: ast.stmt, inner: bool = False) -> ast.stmt:
        """A statement in the new body; `inner`: it may not be run."""
        if isinstance(statement, ast.If):
            own = self.of_the_first(statement.test, statement.body, statement.orelse)
            parts = ([self._statement(s, True) for s in p] for p in own)
            return ast.copy_location(ast.If(self._test(statement.test), *parts), statement)
        if isinstance(statement, ast.For):
            return self._inner_loop(statement)
        name = self._changed(statement)
        if name is not None:
            return self._with_rows(as_assignment(statement, name, SCANNING))
        if isinstance(statement, ast.Expr):
            return self._append(statement, inner)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            return self._assigned_anew(statement, inner)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, ast.AugAssign) and self._is_assigned(statement.target):
            statement = self._entry_anew(statement)
        if all(self._is_assigned(e) for t in targets if t is not None for e in leaves(t)):
            return self._with_rows(statement)
        if any(isinstance(t, ast.Subscript) for t in targets) and isinstance(statement, ast.Assign):
            return self._write(statement, inner)
        raise NotAStep("it assigns something other than a variable")

    def _changed(self, statement: ast.AST) -> str | None:
        """A tensor that is made for the loop and that a statement of it changes in place."""
        name = changed_by(statement) if isinstance(statement, (ast.Expr, ast.Assign)) else None
        return name if name is not None and is_made_before(name, self.tree, self.loop, is_fresh) else None

    def _is_assigned(self, target: ast.expr) -> bool:
        """True for a variable, and for an entry of a container."""
        if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
            return isinstance(target.value, ast.Name) and target.value.id in self.containers
        return isinstance(target, ast.Name)

    def _entry_anew(self, statement: ast.AugAssign) -> ast.stmt:
        """`a[k] += b` as `a[k] = a[k] + b`."""
        target = copy.deepcopy(statement.target)
        target.ctx = ast.Load()
        made = ast.Assign([statement.target], added(target, statement.op, statement.value, SCANNING))  # type: ignore[arg-type]
        return ast.fix_missing_locations(ast.copy_location(made, statement))

    def _inner_loop(self, loop: ast.For) -> ast.stmt:
        """A loop within the body, over something else."""
        if loop.orelse or not all(isinstance(e, ast.Name) for e in leaves(loop.target)):
            raise NotAStep("a loop within it assigns something other than variables")
        body = [self._statement(s, True) for s in loop.body]
        made = ast.For(loop.target, self._with_rows(loop.iter), body, [])
        return ast.fix_missing_locations(ast.copy_location(made, loop))

    def _assigned_anew(self, statement: ast.AugAssign, inner: bool) -> ast.stmt:
        """`a += b` as `a = a + b`: a body must not change what it is given. `made += [row]` appends.

        Who knows the tensor by another name sees the change: then the loop is not what is made of it.
        """
        target, value = statement.target, statement.value
        assert isinstance(target, ast.Name)
        if isinstance(value, ast.List):
            if len(value.elts) != 1 or not isinstance(statement.op, ast.Add):
                raise NotAStep("it adds several entries to a list")
            append = ast.Attribute(ast.Name(target.id, ast.Load()), "append", ast.Load())
            call = ast.Expr(ast.Call(append, value.elts, []))
            return self._append(ast.fix_missing_locations(ast.copy_location(call, statement)), inner)
        made = added(ast.Name(target.id, ast.Load()), statement.op, self._with_rows(value), SCANNING)
        new = ast.Assign([ast.Name(target.id, ast.Store())], made)
        return ast.fix_missing_locations(ast.copy_location(new, statement))

    def _with_rows(self, node: Any) -> Any:
        return TakenRows(self).visit(copy.deepcopy(node))

    def of_the_first(self, test: ast.expr, *parts: Any) -> list[list[Any]]:
        """What is done where a question is answered with yes, and where with no."""
        assert self.header is not None
        told_of, made = told(test, self.header.index), [[copy.deepcopy(n) for n in part] for part in parts]
        if told_of is not None:
            own = OfTheFirst(self.header.index, rows_of(self.loop, self.header.index))
            made[not told_of] = [own.visit(n) for n in made[not told_of]]
        return made

    def _test(self, node: ast.expr) -> ast.expr:
        """What is asked, where only its truth counts."""
        found = TakenRows(self).tested(copy.deepcopy(node))
        assert isinstance(found, ast.expr)
        return found

    def _append(self, statement: ast.Expr, inner: bool) -> ast.stmt:
        call = statement.value
        if isinstance(call, ast.Constant):
            return ast.copy_location(ast.Pass(), statement)
        if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
            raise NotAStep("it calls something for its effect")
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
            raise NotAStep("it calls something for its effect")
        name = root(call.func.value) if isinstance(call.func.value, ast.Name) else None
        if name is None:
            raise NotAStep("it appends to something other than a variable's list")
        if name in self.containers and any(name in stores(s) for s in self.loop.body):
            return self._with_rows(statement)
        self._fresh(name, inner, lambda v: isinstance(v, ast.List) and not v.elts)
        self._only_joined(name)
        self.appended[self._made()] = name
        return self._named(list(self.appended)[-1], call.args[0], statement)

    def _write(self, statement: ast.Assign, inner: bool) -> ast.stmt:
        target = statement.targets[0]
        if len(statement.targets) != 1 or not isinstance(target, ast.Subscript):
            raise NotAStep("it assigns parts of several things")
        assert self.header is not None
        found = place_of(target.slice, self.header.index)
        if found is None or not all(map(is_all, found.rest)) or not isinstance(target.value, ast.Name):
            raise NotAStep("it writes something other than a row of a variable's tensor")
        self._fresh(target.value.id, inner, is_fresh)
        self.written[self._made()] = Written(target.value.id, found.dim, found.keeps)
        return self._named(list(self.written)[-1], statement.value, statement)

    def _made(self) -> str:
        return f"{self.prefix}made_{len(self.appended) + len(self.written)}"

    def _named(self, name: str, value: ast.expr, like: ast.stmt) -> ast.stmt:
        made = ast.Assign([ast.Name(name, ast.Store())], self._with_rows(value))  # type: ignore[arg-type]
        return ast.fix_missing_locations(ast.copy_location(made, like))

    def _fresh(self, name: str, inner: bool, is_made: Callable[[ast.expr], bool]) -> None:
        """What is written must be made right before the loop, for it, and be known to nobody until then."""
        if inner:
            raise NotAStep("it writes or appends only sometimes")
        facts = {id(n) for n in read_for_facts(self.tree)}
        read = lambda body: [n for n in names_in(body) if n.id == name and id(n) not in facts]  # noqa: E731
        if len(read(self.loop.body)) != 1:
            raise NotAStep("it reads what it writes")
        if not is_made_before(name, self.tree, self.loop, is_made):
            raise NotAStep("what it writes is not made for it, or is read before it")

    def _only_joined(self, name: str) -> None:
        """A list must be read once after the loop: joined to a tensor."""
        own = {id(n) for n in ast.walk(self.loop)}
        read = [n for n in reads_behind(self.tree.body, self.loop, name) if id(n) not in own]
        if len(read) != 1:
            raise NotAStep("a list that it appends to is read in several places")
        if not any(is_join(n, read) for n in ast.walk(self.tree)):
            raise NotAStep("a list that it appends to is not joined to a tensor after it")
        self.joined += read


def _with_its_dim(iterated: Iterated, loop: ast.For) -> ast.stmt:
    """`row = row.unsqueeze(dim)`."""
    row = ast.Attribute(ast.Name(iterated.name, ast.Load()), "unsqueeze", ast.Load())
    made = ast.Call(row, [ast.Constant(iterated.row.dim)], [])
    new = ast.Assign([ast.Name(iterated.name, ast.Store())], made)
    return ast.fix_missing_locations(ast.copy_location(new, loop))
