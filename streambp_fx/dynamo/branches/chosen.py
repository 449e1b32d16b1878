"""Loops over the entries that data chooses, as loops over all entries with a branch in each.

`for e in (counts > 0).nonzero():` runs its body for the experts that some row has chosen. Written as
`for e in range(len(counts)): if counts[e] > 0:` it is the same loop with a branch that `rewriting` knows. So
are counts that Python reads as a list, to ask whether an expert has rows.
"""

from __future__ import annotations

import ast
import copy
import enum
import itertools

from ..loops.names import captured_names, names_in, read_behind
from ..loops.source import located
from .objects import ORDER, TRACED, traced_call

# What makes a vector of a column, with these arguments. Not `squeeze()`: one entry alone has no dim then.
_FLAT = {
    *("flatten()", "ravel()", "squeeze(-1)", "squeeze(1)", "squeeze(dim=-1)", "squeeze(dim=1)"),
    *("view(-1)", "reshape(-1)"),
}


class Entry(enum.Enum):
    """What the variable of such a loop is."""

    ROW = "a tensor of one element"
    SCALAR = "a tensor without dims"
    NUMBER = "a number"


def with_all_entries(tree: ast.FunctionDef, prefix: str) -> None:
    """Put loops over all entries in the place of those over chosen ones; in place.

    Args:
        tree: the function.
        prefix: of names that no function has.
    """
    numbers = itertools.count()
    for block in reversed(list(_blocks(tree))):  # the inner ones first
        for loop in [s for s in block if isinstance(s, ast.For)]:
            _replace(tree, block, loop, f"{prefix}entries_{next(numbers)}_")
    _Counts(tree).visit(tree)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """All lists of statements within a function, not those of functions in it."""
    found: list[list[ast.stmt]] = []
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            found.append(value)
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, inner):
            found += _blocks(child)
    return found


def _replace(tree: ast.FunctionDef, block: list[ast.stmt], loop: ast.For, prefix: str) -> None:
    """Replace one loop of a block if it goes over entries that a mask chooses."""
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        return
    given, iterated, captured = None, loop.iter, captured_names(tree)
    if isinstance(iterated, ast.Name):
        given = _only_assignment(tree, iterated.id)
        if given is None or iterated.id in captured:
            return
        iterated = given.value
    mask, entry = _chosen_by(iterated)
    name = loop.target.id
    kept = name in read_behind(tree.body, loop) or name in captured
    if mask is None or kept or _is_assigned(loop.body, name):
        return
    placed = _Placed(name, entry, f"{prefix}place")
    body = [placed.visit(copy.deepcopy(s)) for s in loop.body]
    if placed.others:
        return
    read = ast.parse(f"{prefix}mask = {TRACED}.vector(_)").body[0]
    read.value.args = [mask]  # type: ignore[attr-defined]
    lines = [
        f"for {prefix}place in range({prefix}mask.shape[0]):",
        f"    if {prefix}mask[{prefix}place]:",
        "        pass",
    ]
    over = ast.parse("\n".join(lines)).body[0]
    for node, like in ((read, given or loop), (over, loop)):
        located(node, like)
    over.body[0].body = body  # type: ignore[attr-defined]
    block[block.index(loop)] = over
    if given is None:
        block.insert(block.index(over), read)
        return
    other = next(b for b in _blocks(tree) if any(s is given for s in b))
    other[next(k for k, s in enumerate(other) if s is given)] = read


def _only_assignment(tree: ast.FunctionDef, name: str) -> ast.Assign | None:
    """The statement that gives a variable its only value, which is read once."""
    found = [n for n in names_in([tree]) if n.id == name]
    stores = [n for n in found if isinstance(n.ctx, ast.Store)]
    given = [s for s in ast.walk(tree) if isinstance(s, ast.Assign) and s.targets[0] in stores]
    plain = len(found) == 2 and len(stores) == 1 and len(given) == 1 and len(given[0].targets) == 1
    return given[0] if plain else None


def _is_assigned(body: list[ast.stmt], name: str) -> bool:
    return any(n.id == name and not isinstance(n.ctx, ast.Load) for n in names_in(body))


def _chosen_by(value: ast.expr) -> tuple[ast.expr | None, Entry]:
    """Of an expression that lists the entries of a mask: the mask, and what the entries are."""
    entry = Entry.ROW
    while (called := _method_of(value)) is not None:
        method, operand = called
        if method == "tolist()" and _is_flat(operand):
            entry = Entry.NUMBER
        elif method in _FLAT:
            entry = Entry.SCALAR if entry is Entry.ROW else entry
        elif method != "unbind()":
            break
        value = operand
    if isinstance(value, ast.Subscript):
        return _of_subscript(value, entry)
    return _operand_of(value, "nonzero", keywords=False), entry


def _method_of(value: ast.expr) -> tuple[str, ast.expr] | None:
    """`f(...)` and `x` of `x.f(...)`; not of `torch.f(...)`."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or _is_torch(value.func):
        return None
    whole, operand = ast.unparse(value), ast.unparse(value.func.value)
    return whole.removeprefix(f"{operand}."), value.func.value


def _is_flat(value: ast.expr) -> bool:
    """True for an expression whose entries are numbers."""
    called = _method_of(value)
    return isinstance(value, ast.Subscript) or (called is not None and called[0] in _FLAT)


def _of_subscript(value: ast.Subscript, entry: Entry) -> tuple[ast.expr | None, Entry]:
    """`torch.where(mask)[0]`, `mask.nonzero(as_tuple=True)[0]` and `mask.nonzero()[:, 0]`."""
    entry = Entry.SCALAR if entry is Entry.ROW else entry
    text = ast.unparse(value.slice)
    if text == "0":
        mask = _operand_of(value.value, "where", keywords=False)
        return mask or _operand_of(value.value, "nonzero", keywords=True), entry
    return (
        _operand_of(value.value, "nonzero", keywords=False) if text in (":, 0", "(:, 0)") else None
    ), entry


def _operand_of(value: ast.expr, function: str, keywords: bool) -> ast.expr | None:
    """`x` of `torch.function(x)` and `x.function()`."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    given = [t for k in value.keywords if (t := ast.unparse(k)) != "as_tuple=False"]
    if value.func.attr != function or given != (["as_tuple=True"] if keywords else []):
        return None
    if _is_torch(value.func):
        return value.args[0] if len(value.args) == 1 else None
    return value.func.value if not value.args and function != "where" else None


def _is_torch(function: ast.expr) -> bool:
    assert isinstance(function, ast.Attribute)
    return isinstance(function.value, ast.Name) and function.value.id == "torch"


class _Placed(ast.NodeTransformer):
    """Puts a number in the place of the variable of a loop.

    Args:
        name: the variable.
        entry: what it is.
        place: the name of the number.

    Attributes:
        others: it is used in a way in which a number is something else.
    """

    def __init__(self, name: str, entry: Entry, place: str) -> None:
        self.name, self.entry, self.place, self.others = name, entry, place, False

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.name

    def _number(self, like: ast.AST) -> ast.Name:
        return ast.copy_location(ast.Name(self.place, ast.Load()), like)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_it(node.slice) and isinstance(node.ctx, ast.Load) and self.entry is not Entry.NUMBER:
            value = self.visit(node.value)
            taken = ast.parse(f"{TRACED}.at(_, {self.place}, {self.entry is Entry.ROW})", mode="eval").body
            located(taken, node)
            taken.args[0] = value  # type: ignore[attr-defined]
            return taken
        entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        read = self.entry is Entry.SCALAR and isinstance(node.ctx, ast.Load)
        if not read or not any(map(self._is_it, entries)):
            return self.generic_visit(node)
        # a tensor without dims is a number there
        node.slice.elts = [self._number(e) if self._is_it(e) else self.visit(e) for e in entries]  # type: ignore[attr-defined]
        node.value = traced_call("tensor", self.visit(node.value), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A tensor with dims is compared with a number in the place of a tensor of one element."""
        both = (node.left, *node.comparators)
        one = len(both) == 2 and self._is_it(both[0]) != self._is_it(both[1])
        if one and self.entry is not Entry.NUMBER and isinstance(node.ops[0], ORDER):
            left, right = (
                self._number(e) if self._is_it(e) else traced_call("with_dims", self.visit(e), e)
                for e in both
            )
            node.left, node.comparators = left, [right]
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        number = isinstance(function, ast.Name) and function.id == "int" and len(node.args) == 1
        if number and self._is_it(node.args[0]):
            return self._number(node)
        if isinstance(function, ast.Attribute) and function.attr == "item" and self._is_it(function.value):
            return self._number(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id != self.name:
            return node
        self.others |= self.entry is not Entry.NUMBER
        return self._number(node)


class _Counts(ast.NodeTransformer):
    """Leaves counts as tensors where they are only compared with a number.

    Args:
        tree: the function.
    """

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.tree = tree
        asked = [x for n in ast.walk(tree) if isinstance(n, ast.If) for x in _compared(n.test)]
        self.items = {id(x) for x in asked if _is_call(x, "item")}
        entries = (
            x
            for x in asked
            if isinstance(x, ast.Subscript) and not isinstance(x.slice, (ast.Slice, ast.Tuple))
        )
        self.lists = {id(x.value) for x in entries if isinstance(x.value, ast.Name)}

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        if len(node.targets) == 1 and isinstance(target, ast.Name) and _is_call(value, "tolist"):
            named = [n for n in names_in([self.tree]) if n.id == target.id]
            if len([n for n in named if isinstance(n.ctx, ast.Store)]) == 1 and all(
                id(n) in self.lists for n in named if isinstance(n.ctx, ast.Load)
            ):
                node.value = traced_call("counts", value.func.value, node)  # type: ignore[attr-defined]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.item()` is `x` there."""
        self.generic_visit(node)
        return traced_call("item", node.func.value, node) if id(node) in self.items else node  # type: ignore[attr-defined]


def _compared(test: ast.expr) -> list[ast.expr]:
    """What a test asks about: whether it is not zero, or how it compares with a number."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if not isinstance(test, ast.Compare):
        return [test]
    number = isinstance(test.comparators[0], ast.Constant) and type(test.comparators[0].value) in (int, float)
    plain = len(test.ops) == 1 and isinstance(test.ops[0], ORDER) and number
    return [test.left] if plain else []


def _is_call(value: ast.expr, method: str) -> bool:
    """True for `x.method()`."""
    called = _method_of(value)
    return called is not None and called[0] == f"{method}()"
