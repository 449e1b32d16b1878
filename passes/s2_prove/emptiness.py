"""When does a mask have no true entry: names for `any(mask)` that are equal only where the answers are.

What asks and what selects are often written in different ways: `counts[e] > 0` of a `bincount` and
`where(chosen == e)`. Both are true where some entry of `chosen` is `e`, and that is their name here. What is
not understood is a name of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.facts import expression, tensors_of
from ..graph.op_arguments import arguments
from ..graph.ops.branch import PREDICATE, PREDICATE_OF_SIZE
from ..graph.purity import is_random

aten = torch.ops.aten
Name = tuple[Any, ...]
# Which dims are taken at one place: of `x[2, :, 1]` the dims 0 and 2.
Places = Mapping[int, int]
NOWHERE: Places = {}
# Views and copies that have all entries of their operand.
SAME = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default,
}  # fmt: skip
# Where the result is not zero, neither operand is.
_ALL = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
SELECTED_BY_MASK = (aten.where.default, aten.nonzero.default, aten.nonzero_numpy.default)


class Somewhere:
    """Names of what is true somewhere, in one graph.

    Args:
        graph: the graph; numbers of selected rows are symbols of their own.
    """

    def __init__(self, graph: Graph) -> None:
        self.origins: dict[sympy.Symbol, Node] = {}
        self.same: dict[Node, Node] = {}
        calls: dict[str, Node] = {}
        for node in graph.nodes:
            self.same[node] = calls.setdefault(self._call(node), node)
            for symbol in symbols_of_values(node):
                self.origins.setdefault(symbol, node)

    def _call(self, node: Node) -> str:
        """The same for calls of the same op on the same values."""
        if node.op != "call_function" or is_random(node) or symbols_of_values(node):
            return node.name
        return str(torch.fx.node.map_arg((node.target, node.args, dict(node.kwargs)), self.same.__getitem__))

    def name(self, node: Node, places: Places = NOWHERE) -> Name:
        """The name of `any(value != 0)`.

        Args:
            node: a value of any shape, dtype bool or a number.
            places: the part of it that is asked about.
        """
        rule = RULES.get(node.target)
        found = None if rule is None else rule(self, node, dict(places))
        return found or ("value", self.same[node], *sorted(places.items()))

    def implied(self, mask: Node) -> set[Name]:
        """Names of what is true somewhere if a mask has a true entry."""
        found = {self.name(mask)}
        if mask.target in _ALL:
            for operand in mask.all_input_nodes:
                found |= self.implied(operand)
        return found

    def mask(self, symbol: sympy.Symbol) -> Node | None:
        """The mask whose true entries a number of selected rows counts."""
        origin = self.origins.get(symbol)
        if origin is None:
            return None
        if origin.target in SELECTED_BY_MASK:
            return origin.args[0]  # type: ignore[return-value]
        masks = [n for n in _indices(origin) if is_mask(n)]
        return masks[0] if origin.target is aten.index.Tensor and len(masks) == 1 else None

    def name_of_number(self, number: Any, negated: bool = False) -> Name | None:
        """The name of what a number that is 1 or 0 says of a number of selected rows; None if nothing.

        Args:
            number: of selected rows, as a size.
            negated: it is 0 where rows are selected.
        """
        asked = expression(number)
        (symbol, *others) = sorted(asked.free_symbols, key=str) or [None]
        mask = None if symbol is None or others else self.mask(symbol)
        if mask is None:
            return None
        positive = sympy.Symbol("count", integer=True, positive=True)
        answers = [sympy.simplify(asked.subs(symbol, value)) for value in (0, positive)]
        return self.name(mask) if answers == ([1, 0] if negated else [0, 1]) else None


def symbols_of_values(node: Node) -> set[sympy.Symbol]:
    """Of the sizes of a value, the symbols that the values of others say."""
    value = node.meta.get("val")
    return set() if value is None else free_unbacked_symbols(value)


def is_mask(node: Any) -> bool:
    """True for an index that is a mask."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _indices(node: Node) -> list[Any]:
    return list(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []


# ---- rules


Rule = Callable[[Somewhere, Node, dict[int, int]], Name | None]
RULES: dict[Any, Rule] = {}


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def _is_binary(node: Node) -> bool:
    """True for values that are 0 or 1."""
    if node.meta["val"].dtype is torch.bool or node.target is aten.one_hot.default:
        return True
    if node.target not in (*SAME, *_MOVED, *_CASTS):
        return False
    return _is_binary(node.args[0])  # type: ignore[arg-type]


def _is_not_negative(node: Node) -> bool:
    """True for numbers that are 0 or more, and counts of them."""
    if node.target is aten.bincount.default:
        return arguments(node)["weights"] is None
    if node.target in (*_SUMS, *SAME, *_MOVED):
        kept = node.target not in _SUMS or _holds_counts(node)
        return kept and _is_not_negative(node.args[0])  # type: ignore[arg-type]
    return _is_binary(node)


def _holds_counts(node: Node) -> bool:
    """True for a dtype in which no sum of zeros and ones overflows to zero or less."""
    dtype = node.meta["val"].dtype
    return dtype is torch.int64 or dtype.is_floating_point


@_rule(*SAME)
def _same(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    (operand,) = node.all_input_nodes[:1]
    moves = node.target not in (aten.contiguous.default, aten.clone.default, aten.detach.default)
    return None if places and moves else known.name(operand, places)


_MOVED = (
    aten.select.int, aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.t.default,
)  # fmt: skip


@_rule(*_MOVED)
def _moved(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    found = _operand_places(node, places)
    return None if found is None else known.name(node.args[0], found)  # type: ignore[arg-type]


def _operand_places(node: Node, places: Mapping[int, int]) -> dict[int, int] | None:
    """Which part of its operand is a part of a view; None if that is not known."""
    given, operand = arguments(node), node.args[0]
    assert isinstance(operand, Node)
    rank = operand.meta["val"].dim()
    dims = _dims_of_operand(node, given, rank)
    found = {d: at for d, at in ((dims[p], at) for p, at in places.items()) if d is not None}
    if node.target is aten.select.int:
        size, at = operand.meta["val"].shape[given["dim"]], given["index"]
        if not isinstance(at, int) or (at < 0 and not isinstance(size, int)):
            return None
        found[given["dim"] % rank] = at if at >= 0 else at + size
    return found


def _dims_of_operand(node: Node, given: Mapping[str, Any], rank: int) -> list[int | None]:
    """By dim of a view, the dim of its operand; None for one that is new."""
    dims: list[int | None] = list(range(rank))
    if node.target is aten.select.int:
        dims.pop(given["dim"] % rank)
    elif node.target is aten.permute.default:
        dims = [d % rank for d in given["dims"]]
    elif node.target is aten.t.default:
        dims.reverse()
    elif node.target is aten.transpose.int:
        a, b = given["dim0"] % rank, given["dim1"] % rank
        dims[a], dims[b] = dims[b], dims[a]
    elif node.target is aten.unsqueeze.default:
        dims.insert(given["dim"] % (rank + 1), None)
    elif len(tensors_of(node)[0].shape) != rank:
        dims.pop(given["dim"] % rank)
    return dims


_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)


@_rule(*_SUMS, *_ANY, aten.count_nonzero.default)
def _reduced(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    given, operand = arguments(node), node.args[0]
    assert isinstance(operand, Node)
    if node.target in _SUMS and not (_is_not_negative(operand) and _holds_counts(node)):
        return None
    rank, dim = operand.meta["val"].dim(), given.get("dim")
    gone = {d % rank for d in ([dim] if isinstance(dim, int) else dim or range(rank))} if rank else set()
    kept = [d for d in range(rank) if d not in gone]
    dims = list(range(rank)) if given.get("keepdim") else kept
    return known.name(operand, {dims[d]: at for d, at in places.items() if dims[d] not in gone})


_CASTS = (aten.to.dtype, aten._to_copy.default)


@_rule(*_CASTS)
def _cast(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    operand = node.args[0]
    assert isinstance(operand, Node)
    return known.name(operand, places) if _is_binary(operand) else None


@_rule(aten.gt.Scalar, aten.ne.Scalar, aten.ge.Scalar)
def _positive(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    operand, number = node.args[0], node.args[1]
    assert isinstance(operand, Node)
    wanted = 1 if node.target is aten.ge.Scalar else 0
    if not isinstance(number, (bool, int)) or number != wanted:
        return None
    if node.target is not aten.ne.Scalar and not _is_not_negative(operand):
        return None
    return known.name(operand, places)


@_rule(aten.eq.Scalar)
def _equal(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    operand, number = node.args[0], node.args[1]
    if places or not isinstance(number, int) or not isinstance(operand, Node):
        return None
    return _has(known, operand, number)


def _has(known: Somewhere, values: Node, number: int) -> Name:
    """The name of: one of these values is the number."""
    while values.target in (*SAME, aten.unsqueeze.default, *_WIDER) and _keeps_numbers(values):
        values = values.args[0]  # type: ignore[assignment]
    return "has", known.same[values], number


_WIDER = (aten.to.dtype, aten._to_copy.default)


def _keeps_numbers(node: Node) -> bool:
    """True for what is no cast, and for one to int64 of whole numbers."""
    before = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    whole = not (before.is_floating_point or before.is_complex)
    return node.target not in _WIDER or (whole and node.meta["val"].dtype is torch.int64)


@_rule(aten.one_hot.default)
def _one_hot(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    last = node.meta["val"].dim() - 1
    if set(places) != {last}:
        return None
    return _has(known, node.args[0], places[last])  # type: ignore[arg-type]


@_rule(aten.bincount.default)
def _counted(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    if set(places) != {0} or arguments(node)["weights"] is not None:
        return None
    return _has(known, node.args[0], places[0])  # type: ignore[arg-type]


@_rule(aten.logical_not.default, aten.bitwise_not.default)
def _negated(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    operand = node.args[0]
    assert isinstance(operand, Node)
    if operand.target is PREDICATE_OF_SIZE.default:
        return known.name_of_number(_number(operand), negated=True)
    while operand.target in (PREDICATE.default, *SAME):
        operand = operand.args[0]  # type: ignore[assignment]
    if operand.meta["val"].dim() or operand.meta["val"].dtype is not torch.bool:
        return None
    if operand.target is aten.logical_not.default:
        return known.name(operand.args[0], {})  # type: ignore[arg-type]
    count = operand.args[0] if operand.target is aten.eq.Scalar and operand.args[1] == 0 else None
    return known.name(count, {}) if isinstance(count, Node) else None


@_rule(PREDICATE.default)
def _asked(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    return known.name(node.args[0], {})  # type: ignore[arg-type]


@_rule(PREDICATE_OF_SIZE.default)
def _asked_of_size(known: Somewhere, node: Node, places: dict[int, int]) -> Name | None:
    return known.name_of_number(_number(node))


# ---- masks that are true once in a row at most


_RANKED = (aten.topk.default, aten.sort.default, aten.sort.stable)


def is_one_of_distinct(mask: Any) -> bool:
    """True for `indices == number`, (rows, k) or (k, rows), where no row has an index twice: of a `topk`.

    Args:
        mask: a node of a graph.
    """
    if not isinstance(mask, Node) or mask.op != "call_function" or mask.meta["val"].dim() != 2:
        return False
    found = _compared(mask, {})
    return found is not None and _has_distinct_rows(found)


def _compared(mask: Node, places: dict[int, int]) -> Node | None:
    """The values of which a mask says, each for itself, whether they are one number; None if it does not.

    Args:
        places: the part of it that is meant.
    """
    operand = mask.args[0] if mask.args else None
    if not isinstance(operand, Node):
        return None
    if mask.target is aten.eq.Scalar:
        return operand if not places else None
    if mask.target is aten.one_hot.default:
        return operand if set(places) == {mask.meta["val"].dim() - 1} else None
    if mask.target in (*_CASTS, aten.gt.Scalar, aten.ne.Scalar):
        asks = mask.target in _CASTS or mask.args[1] == 0
        return _compared(operand, places) if asks and _is_binary(operand) else None
    found = _operand_places(mask, places) if mask.target in _MOVED else None
    return None if found is None else _compared(operand, found)


def _has_distinct_rows(values: Node) -> bool:
    """True for the indices that an op gives, each once, along the last of two dims."""
    while values.target in (aten.clone.default, aten.contiguous.default, *_CASTS) and _keeps_numbers(values):
        values = values.args[0]  # type: ignore[assignment]
    if values.target is aten.argsort.default:
        op, second = values, True
    else:
        op, second = values.args[0] if values.args else None, values.args[1:] == (1,)
    if not isinstance(op, Node) or op.target not in (*_RANKED, aten.argsort.default) or not second:
        return False
    rank = op.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return rank == 2 and arguments(op)["dim"] % rank == 1


def number_of_indices(values: Node) -> int | None:
    """How many different numbers there may be among the indices that an op gives, of which there are some.

    None for other values.

    Args:
        values: whole numbers, of any shape.
    """
    if symbols_of_values(values):
        return None  # there may be none
    while values.target in (*SAME, aten.select.int, *_CASTS) and _keeps_numbers(values):
        values = values.args[0]  # type: ignore[assignment]
    op = values.args[0] if values.target is operator.getitem and values.args[1] == 1 else values
    if not isinstance(op, Node) or op.target not in (*_RANKED, aten.argsort.default, aten.argmax.default):
        return None
    dim, sizes = arguments(op)["dim"], op.args[0].meta["val"].shape  # type: ignore[union-attr]
    size = sizes[dim] if dim is not None and sizes else None
    return size if isinstance(size, int) else None


def _number(node: Node) -> Any:
    number = node.args[0]
    return number.meta["val"] if isinstance(number, Node) else number
