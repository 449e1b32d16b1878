"""Where rows are taken and written: indices with the variable of a loop."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .names import assigned


@dataclass(frozen=True)
class Row:
    """A row of a tensor that the body of a loop reads.

    Attributes:
        tensor: an expression: a variable that no statement of the body changes, or what the loop goes over.
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
    counted = [k for k, e in enumerate(entries) if not _is_new_dim(e)]
    dim = counted.index(place) - (len(counted) if dots and dots[0] < place else 0)
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
    return _is_dots(entry) or _is_new_dim(entry) or integer(entry) is not None


def _is_new_dim(entry: ast.expr) -> bool:
    return isinstance(entry, ast.Constant) and entry.value is None


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
        count: how many rows; None: those of the first of `rows`.
        index: the variable with the number of the row, if there is one.
        rows: if it goes over the rows of tensors, these.
    """

    count: ast.expr | None
    index: str | None = None
    rows: tuple[Iterated, ...] = ()


@dataclass(frozen=True)
class Iterated:
    """A tensor whose rows a loop goes over.

    Attributes:
        name: the variable with one of them.
        row: the tensor, any expression: it is evaluated once.
        keeps: a row has a dim of one entry for itself.
    """

    name: str
    row: Row
    keeps: bool = False


# What gives a tensor if it is called on one. Who iterates over something else falls back to the loop.
OF_TENSORS = {
    "transpose",
    "permute",
    "movedim",
    "swapaxes",
    "swapdims",
    "moveaxis",
    "contiguous",
    "flip",
    "t",
}
CUTS = {"unbind", "split"}
# A function with a header has one of these.
NAMES = {"range", *CUTS, *OF_TENSORS}


def header_of(loop: ast.For, tree: ast.FunctionDef) -> Header | None:
    """`range(n)`, rows of tensors, `zip` and `enumerate` of these; None if a loop goes over something else.

    Args:
        loop: a loop.
        tree: the function that it stands in.
    """
    call, target, index = loop.iter, loop.target, None
    if isinstance(call, ast.Call) and _calls(call, "range"):
        if not isinstance(target, ast.Name) or call.keywords:
            return None
        given = call.args[1:] if len(call.args) == 2 and integer(call.args[0]) == 0 else call.args
        return Header(given[0], target.id) if len(given) == 1 else None
    if isinstance(call, ast.Call) and _calls(call, "enumerate"):
        pair = target.elts if isinstance(target, ast.Tuple) else []
        if len(call.args) != 1 or call.keywords or len(pair) != 2 or not isinstance(pair[0], ast.Name):
            return None
        index, target, call = pair[0].id, pair[1], call.args[0]
    pairs = [(target, call)]
    if isinstance(call, ast.Call) and _calls(call, "zip"):
        targets = target.elts if isinstance(target, ast.Tuple) else []
        named = {k.arg for k in call.keywords}  # whoever asks for equal lengths gets them, or the loop
        if not named <= {"strict"} or not call.args or len(targets) != len(call.args):
            return None
        pairs = list(zip(targets, call.args, strict=True))
    found = [_iterated(t, e, tree) for t, e in pairs]
    names = [x.name for x in found if x is not None]
    if len(names) != len(pairs) or len({*names, index}) != len(names) + 1:
        return None
    return Header(None, index, tuple(x for x in found if x is not None))


def _calls(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _iterated(target: ast.expr, given: ast.expr, tree: ast.FunctionDef) -> Iterated | None:
    """Rows of `x.unbind(dim)`, `torch.unbind(x, dim)`, `x.split(1, dim)`, or of a tensor; None of others."""
    if not isinstance(target, ast.Name):
        return None
    name = _function_of_tensor(given)
    if name in CUTS:
        assert isinstance(given, ast.Call)
        return _cut(target.id, name, given)
    made = given
    if isinstance(given, ast.Name):
        values = [assigned(given.id, n) for n in ast.walk(tree) if isinstance(n, ast.stmt)]
        made = next((v for v in values if v is not None), given)
    return Iterated(target.id, Row(given, 0)) if _function_of_tensor(made) in OF_TENSORS else None


def _function_of_tensor(call: ast.expr) -> str | None:
    """The name of a method, or of a function of `torch`, that is called."""
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None


def _cut(target: str, name: str, call: ast.Call) -> Iterated | None:
    """The rows of `unbind` or `split`, of one entry."""
    assert isinstance(call.func, ast.Attribute)
    given = [call.func.value, *call.args]
    if isinstance(given[0], ast.Name) and given[0].id == "torch":
        given = given[1:]
    keywords = {k.arg: k.value for k in call.keywords}
    if not given or not keywords.keys() <= {"dim"}:
        return None
    tensor, rest = given[0], given[1:]
    if name == "split":
        if not rest or integer(rest[0]) != 1:
            return None
        rest = rest[1:]
    rest += keywords.values()
    dim = 0 if not rest else integer(rest[0]) if len(rest) == 1 else None
    return None if dim is None else Iterated(target, Row(tensor, dim), name == "split")
