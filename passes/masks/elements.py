"""One element of a tensor as a symbolic expression, and one block of it as a tensor.

Both are demand-driven walks from a node to its operands, by the rules registered in `MASK_RULES` for the ops:

- `Elements.at(node, index)`: the value at a symbolic index. Bool tensors give a sympy Boolean; the others
  give *cases*, a tuple of (condition, value) of which exactly one condition holds. A value is a Python float
  (exactly what is stored), an integer sympy expression, or an unknown function applied to the index.
- `Blocks.block(node, dims)`: the tensor's rows and columns in the given intervals.

Values with at most one sequence dim ("linear" values) end both walks: their elements may stay unknown
functions, and their blocks are slices of the tensor that the caller computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import And, Boolean, Not, Or
from torch import fx

Index = tuple[sympy.Expr, ...]
Leaf = Any  # float | sympy.Expr | sympy Boolean (results of comparisons only)
Cases = tuple[tuple[Boolean, Leaf], ...]
Interval = tuple[Any, Any] | None  # (start, stop), ints or SymInts; None: the whole dim
Dims = tuple[Interval, ...]

MAX_CASES = 32
# Positions, and integers among the data that arithmetic is done with, are taken to be smaller than this.
LONGEST = 2**24

# The index symbols of a mask's element: query row, key column, batch entry, head.
ROW_INDEX = sympy.Symbol("i", integer=True, nonnegative=True)
COLUMN_INDEX = sympy.Symbol("j", integer=True, nonnegative=True)
BATCH = sympy.Symbol("b", integer=True, nonnegative=True)
HEAD = sympy.Symbol("h", integer=True, nonnegative=True)


class MaskNotUnderstood(Exception):
    """A value cannot be evaluated or materialised.

    Attributes:
        node: the node at which it failed.
        reason: one readable line.
    """

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name}: {reason}")
        self.node = node
        self.reason = reason


def shape(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """Sizes of a tensor node, as sympy expressions."""
    return tuple(_size(s) for s in tensor(node).shape)


def tensor(node: fx.Node) -> torch.Tensor:
    """The example value of a tensor node, which has its shape and dtype.

    Raises:
        MaskNotUnderstood: the node has no tensor as its value.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise MaskNotUnderstood(node, "not a tensor with known shape and dtype")
    return value


def _size(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def is_tensor(arg: Any) -> bool:
    """True if `arg` is a node whose value is a tensor."""
    return isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.Tensor)


def repeats_no_symbol(node: fx.Node) -> bool:
    """True if no size symbol occurs in two dims of `node`: it has at most one sequence dim."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    symbols = [set(_size(s).free_symbols) for s in value.shape]
    return not any(a & b for a, b in itertools.combinations(symbols, 2))


def number(leaf: Leaf) -> float | int | None:
    """`leaf` as a Python number, or None if it is not a constant."""
    if isinstance(leaf, (bool, int, float)):
        return leaf
    return int(leaf) if isinstance(leaf, sympy.Integer) else None


def leaf_of(value: float | int | bool) -> Leaf:
    """A Python number as a leaf: integers are exact sympy numbers, floats stay floats."""
    return value if isinstance(value, float) else sympy.Integer(int(value))


def to_cases(value: Boolean | Cases) -> Cases:
    """Booleans as the numbers 0 and 1, by cases."""
    if isinstance(value, tuple):
        return value
    return prune(((value, sympy.S.One), (Not(value), sympy.S.Zero)))


def to_boolean(cases: Cases) -> Boolean:
    """The condition under which a value given by cases is not zero."""
    return Or(*(And(condition, _nonzero(leaf)) for condition, leaf in cases))


def _nonzero(leaf: Leaf) -> Boolean:
    if isinstance(leaf, Boolean):
        return leaf
    return sympy.sympify(leaf != 0) if isinstance(leaf, float) else sympy.Ne(leaf, 0)


def prune(cases: Cases) -> Cases:
    """Without the cases that cannot happen; cases of one value are merged."""
    by_leaf: dict[Any, list] = {}
    for condition, leaf in cases:
        if condition is not sympy.false:
            by_leaf.setdefault((type(leaf), leaf), []).append(condition)
    if len(by_leaf) == 1:  # the conditions of all cases together always hold
        return ((sympy.true, next(iter(by_leaf))[1]),)
    return tuple((Or(*conditions), leaf) for (_, leaf), conditions in by_leaf.items())


@dataclass(frozen=True)
class MaskRule:
    """How one op is evaluated at an element and built by blocks.

    Attributes:
        element: `(elements, node, index) -> Boolean | Cases`, the value at a symbolic index.
        operands: `(node, dims) -> [(operand, its dims)]`, what a block needs; decided without any tensor.
        build: `(blocks, node, dims, by_operand) -> Tensor`, the block from the operands' blocks.
    Each raises MaskNotUnderstood for a form of the op that it does not cover.
    """

    element: Callable[[Elements, fx.Node, Index], Boolean | Cases]
    operands: Callable[[fx.Node, Dims], list[tuple[fx.Node, Dims]]]
    build: Callable[[Blocks, fx.Node, Dims, dict[fx.Node, torch.Tensor]], torch.Tensor]


MASK_RULES: dict[Any, MaskRule] = {}


def aligned(node: fx.Node, dims: Dims) -> list[tuple[fx.Node, Dims]]:
    """All tensor operands, their dims aligned from the right as broadcasting does."""
    return [(n, broadcast(node, n, dims)) for n in node.all_input_nodes if is_tensor(n)]


def broadcast(node: fx.Node, operand: fx.Node, values: tuple) -> tuple:
    """The entries of `values` (one a dim of `node`) for the dims of `operand`, aligned from the right.

    Raises:
        MaskNotUnderstood: the operand has more dims, or others.
    """
    sizes, out = shape(operand), shape(node)
    if len(sizes) > len(out):
        raise MaskNotUnderstood(node, f"{operand.name} has more dims than the result")
    tail = len(out) - len(sizes)
    if any(s not in (1, o) for s, o in zip(sizes, out[tail:], strict=True)):
        raise MaskNotUnderstood(node, f"cannot align {operand.name} {sizes} with {out}")
    return values[tail:]


def call(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """The op itself on the operands' blocks; the result has the rank and the dtype of `node`."""

    def value(n: fx.Node) -> Any:
        return operands[n] if n in operands else blocks.fetch(n)

    return node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))


def rule_for(node: fx.Node) -> MaskRule:
    """The rule of the node's op. An elementwise op without one has blocks, and nothing is known of elements.

    Raises:
        MaskNotUnderstood: there is none.
    """
    rule = MASK_RULES.get(node.target) if node.op == "call_function" else None
    tags = getattr(node.target, "tags", ())
    if rule is None and torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return MaskRule(_unknown, aligned, call)
    if rule is None:
        raise MaskNotUnderstood(node, f"no mask rule for {node.target}")
    return rule


def _unknown(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    raise MaskNotUnderstood(node, f"no mask rule for {node.target}")


class Elements:
    """Symbolic evaluation of elements.

    Args:
        is_linear: says of a node whether its value has at most one sequence dim.
        bounds: what holds for the index symbols, for proofs that an index is not negative.

    Attributes:
        linear: the linear nodes whose elements stayed unknown functions, by function name (the node's name).
    """

    def __init__(self, is_linear: Callable[[fx.Node], bool], bounds: tuple[Boolean, ...] = ()) -> None:
        self.is_linear = is_linear
        self.bounds = bounds
        self.linear: dict[str, fx.Node] = {}
        self._known: dict[tuple[fx.Node, Index], Boolean | Cases] = {}

    def at(self, node: fx.Node, index: Index) -> Boolean | Cases:
        """The element of `node` at `index` (one expression a dim); raises MaskNotUnderstood."""
        sizes = shape(node)
        index = tuple(sympy.S.Zero if s == 1 else e for e, s in zip(index, sizes, strict=True))
        key = (node, index)
        if key not in self._known:
            try:
                self._known[key] = self._evaluate(node, index)
            except MaskNotUnderstood:
                # A T x T tensor that the caller was given is as good a function as a linear one.
                if not (self.is_linear(node) or node.op == "placeholder"):
                    raise
                self._known[key] = self.unknown(node, index)
        return self._known[key]

    def cases(self, node: fx.Node, index: Index) -> Cases:
        """The element as cases, bools as 0 and 1."""
        return to_cases(self.at(node, index))

    def integer(self, node: fx.Node, index: Index) -> sympy.Expr:
        """The element of an integer tensor, if it is the same expression in all cases.

        Raises:
            MaskNotUnderstood: it is not an integer, or not the same one in all cases.
        """
        cases = self.cases(node, index)
        if len(cases) != 1 or not isinstance(cases[0][1], sympy.Expr) or not cases[0][1].is_integer:
            raise MaskNotUnderstood(node, "an index that is not one integer expression")
        return cases[0][1]

    def unknown(self, node: fx.Node, index: Index) -> Boolean | Cases:
        """The element as an application of an unknown function, named as the node.

        Raises:
            MaskNotUnderstood: the values are complex.
        """
        if self.is_linear(node):
            self.linear[node.name] = node
        dtype = tensor(node).dtype
        if dtype.is_complex:
            raise MaskNotUnderstood(node, "complex values")
        if dtype.is_floating_point:
            return ((sympy.true, sympy.Function(node.name, real=True)(*index)),)
        applied = sympy.Function(node.name, integer=True)(*index)
        return sympy.Ne(applied, 0) if dtype is torch.bool else ((sympy.true, applied),)

    def _evaluate(self, node: fx.Node, index: Index) -> Boolean | Cases:
        if node.op == "get_attr":
            return self._constant(node)
        if tensor(node).dtype.is_complex:
            raise MaskNotUnderstood(node, "complex values")
        value = rule_for(node).element(self, node, index)
        if tensor(node).dtype is torch.bool:
            return to_boolean(value) if isinstance(value, tuple) else value
        cases = prune(to_cases(value))
        if len(cases) > MAX_CASES:
            raise MaskNotUnderstood(node, f"more than {MAX_CASES} cases")
        if any(isinstance(leaf, float) and leaf != leaf for _, leaf in cases):
            raise MaskNotUnderstood(node, "a value that is not a number")
        if not all(_fits(leaf, tensor(node).dtype) for _, leaf in cases):
            raise MaskNotUnderstood(node, f"a value that {tensor(node).dtype} may be too narrow for")
        return cases

    def _constant(self, node: fx.Node) -> Boolean | Cases:
        value: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        one_number = type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta
        if not one_number or value.dtype.is_complex:
            raise MaskNotUnderstood(node, "not a constant of one element")
        return ((sympy.true, leaf_of(value.item())),)


def _fits(leaf: Leaf, dtype: torch.dtype) -> bool:
    """True if an integer is certain to be exact in its dtype, for positions and data up to `LONGEST`."""
    if dtype.is_floating_point or not isinstance(leaf, sympy.Expr) or isinstance(leaf, AppliedUndef):
        return True
    return _greatest(leaf) <= torch.iinfo(dtype).max


def _greatest(value: sympy.Expr) -> int:
    """A bound of the absolute value of an integer expression."""
    if value.is_Integer:
        return abs(int(value))
    if value.is_Add:
        return sum(map(_greatest, value.args))
    if value.is_Mul:
        return math.prod(map(_greatest, value.args))
    if value.is_Pow and value.exp.is_Integer and value.exp >= 0:
        return _greatest(value.base) ** int(value.exp)
    known = not value.args or value.is_Function  # a position, data, or a quotient of those
    return LONGEST if known else 2**64


def same_size(dims: Dims, sizes: tuple[sympy.Expr, ...]) -> Dims:
    """`dims` with the dims of size 1 kept whole: they are broadcast."""
    return tuple(None if s == 1 else d for d, s in zip(dims, sizes, strict=True))


class Blocks:
    """Materialises blocks of values from their linear operands; see `masks.analysis.materialize`."""

    def __init__(self, fetch: Callable[[fx.Node], Any], is_linear: Callable[[fx.Node], bool]) -> None:
        self.fetch = fetch
        self.is_linear = is_linear
        # The dims are kept beside the block so that the ids in the key stay theirs.
        self._known: dict[Any, tuple[Dims, torch.Tensor]] = {}

    def block(self, node: fx.Node, dims: Dims) -> torch.Tensor:
        """The block of `node` in the intervals `dims`, one entry a dim."""
        dims = same_size(dims, shape(node))
        key = (node, tuple(d and (id(d[0]), id(d[1])) for d in dims))
        if key not in self._known:
            if is_source(node, self.is_linear):
                self._known[key] = dims, _slice(self.fetch(node), dims)
            else:
                rule = rule_for(node)
                operands = {n: self.block(n, d) for n, d in rule.operands(node, dims)}
                self._known[key] = dims, rule.build(self, node, dims, operands)
        return self._known[key][1]

    def scalar(self, arg: Any) -> Any:
        """A size or number of the graph: nodes are fetched."""
        return self.fetch(arg) if isinstance(arg, fx.Node) else arg


def is_source(node: fx.Node, is_linear: Callable[[fx.Node], bool]) -> bool:
    """True if a block of `node` is a slice of a tensor that exists: a linear value or an input."""
    return node.op in ("placeholder", "get_attr") or is_linear(node)


def _slice(value: torch.Tensor, dims: Dims) -> torch.Tensor:
    for dim, interval in enumerate(dims):
        if interval is not None:
            value = value.narrow(dim, interval[0], interval[1] - interval[0])
    return value
