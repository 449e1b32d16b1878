"""What the ops that masks are made of do to one element and to one block: one small rule an op.

A rule is a function `(elements, node, index) -> value` under `@mask_rule(op, ...)`. Its block side is the
pair `operands` (which intervals of which operands a block needs) and `build`; by default operands are aligned
as broadcasting does and the op itself is called on their blocks. See `elements` for the two walks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import And, Boolean, Not, Or, Xor
from torch import fx

from .elements import (
    MAX_CASES,
    Cases,
    Elements,
    Index,
    Leaf,
    MaskNotUnderstood,
    broadcast,
    is_tensor,
    leaf_of,
    number,
    prune,
    tensor,
    to_boolean,
)
from .registry import EXACT, aten, mask_rule, one_element, own, scalar_leaf

# --- Element by element ---------------------------------------------------------------------------


def products(node: fx.Node, operands: list[Cases]) -> Iterable[tuple[Boolean, list[Leaf]]]:
    """Every possible combination of the operands' cases.

    Raises:
        MaskNotUnderstood: there are more than `MAX_CASES` combinations.
    """
    combined: list[tuple[Boolean, list[Leaf]]] = [(sympy.true, [])]
    for cases in operands:
        combined = [(And(c, d), [*leaves, v]) for c, leaves in combined for d, v in cases]
        combined = [(c, leaves) for c, leaves in combined if c is not sympy.false]
        if len(combined) > MAX_CASES:
            raise MaskNotUnderstood(node, f"more than {MAX_CASES} cases")
    return combined


def pointwise(exact: Callable | None = None, bias: bool = False) -> Callable:
    """The element rule of a pointwise op.

    Constants are computed by the op itself, in its dtypes. `exact` is the op on integer expressions. `bias`
    says that on floats the result may stay an unknown number; such a value is a bias and is never compared.
    """

    def element(elements: Elements, node: fx.Node, index: Index) -> Cases:
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        cases = [elements.cases(n, broadcast(node, n, index)) for n in operands]
        result = []
        for condition, leaves in products(node, cases):
            leaf = _combine(elements, node, index, dict(zip(operands, leaves, strict=True)), exact, bias)
            result.append((condition, leaf))
        return tuple(result)

    return element


def _combine(
    elements: Elements,
    node: fx.Node,
    index: Index,
    leaves: dict[fx.Node, Leaf],
    exact: Callable | None,
    bias: bool,
) -> Leaf:
    """One result of a pointwise op, of one value for each operand."""
    dtypes = {tensor(n).dtype for n in leaves}
    numbers = {n: number(leaf) for n, leaf in leaves.items()}
    scalars = [n for n in node.all_input_nodes if n not in leaves]
    out = tensor(node).dtype
    if not scalars and all(v is not None for v in numbers.values()):
        known = {n: v for n, v in numbers.items() if v is not None}
        like = {n: one_element(v, tensor(n).dtype, tensor(n).dim()) for n, v in known.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), like.__getitem__)
        return leaf_of(node.target(*args, **kwargs).item())
    if exact is not None and dtypes <= {*EXACT, torch.bool} and out in (*EXACT, torch.bool):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: leaves.get(n, n))
        args = [_exact_scalar(node, a) for a in args]
        return exact(*args, **kwargs)
    if bias and out.is_floating_point:
        return _biased(elements, node, index, numbers)
    raise MaskNotUnderstood(node, f"{node.target} of values that are not constant")


def _exact_scalar(node: fx.Node, arg: Any) -> Any:
    if isinstance(arg, sympy.Basic):
        return arg
    leaf = scalar_leaf(node, arg)
    if isinstance(leaf, float):
        if not leaf.is_integer():
            raise MaskNotUnderstood(node, "integers with a fractional number")
        return sympy.Integer(int(leaf))
    return leaf


def _biased(elements: Elements, node: fx.Node, index: Index, numbers: dict) -> Leaf:
    """A float result that depends on an unknown number: minus infinity if masked, else an unknown bias.

    The sum of a fill as large as finfo.min and a bias stays masked, as the model itself relies on.
    """
    masked = any(v is not None and is_masked(v, tensor(n).dtype) for n, v in numbers.items())
    if masked:
        unscaled = node.target is aten.add.Tensor and "alpha" not in node.kwargs
        if not unscaled or tensor(node).dtype is torch.float16:  # a bias of 32752 is within reach of float16
            raise MaskNotUnderstood(node, "arithmetic on masked values")
        return float("-inf")
    return elements.unknown(node, index)[0][1]


def is_masked(value: float, dtype: torch.dtype) -> bool:
    """True if adding `value`, of float `dtype`, to a score masks it: it is -inf or near finfo.min."""
    return dtype.is_floating_point and value <= torch.finfo(dtype).min / 2


def _floor_quotient(a: sympy.Expr, b: sympy.Expr, **_: Any) -> sympy.Expr:
    if not (b.is_Integer and b > 0):
        raise ValueError("not a positive constant")
    return sympy.floor(a / b)


def _quotient(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A quotient: floor division of integers by a positive constant is exact, others are a bias."""
    divisor = node.args[1]
    floor = node.target is aten.floor_divide.default or own(node, "rounding_mode") == "floor"
    exact = _floor_quotient if floor and isinstance(divisor, int) and divisor > 0 else None
    return pointwise(exact, bias=True)(elements, node, index)


def _remainder(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The remainder of integers by a positive constant, through the floor of the quotient."""
    if not (isinstance(node.args[1], int) and node.args[1] > 0):
        return pointwise()(elements, node, index)
    return pointwise(lambda a, b: a - b * sympy.floor(a / b))(elements, node, index)


for name, relation in {
    "le": sympy.Le,
    "lt": sympy.Lt,
    "ge": sympy.Ge,
    "gt": sympy.Gt,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
}.items():
    packet = getattr(aten, name)
    mask_rule(packet.Tensor, packet.Scalar)(pointwise(relation))
mask_rule(aten.add.Tensor, aten.add.Scalar)(pointwise(lambda a, b, alpha=1: a + alpha * b, bias=True))
mask_rule(aten.sub.Tensor, aten.sub.Scalar)(pointwise(lambda a, b, alpha=1: a - alpha * b, bias=True))
mask_rule(aten.rsub.Tensor, aten.rsub.Scalar)(pointwise(lambda a, b, alpha=1: b - alpha * a, bias=True))
mask_rule(aten.mul.Tensor, aten.mul.Scalar)(pointwise(operator.mul, bias=True))
mask_rule(aten.neg.default)(pointwise(operator.neg, bias=True))
mask_rule(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)(_quotient)
mask_rule(aten.floor_divide.default)(_quotient)
mask_rule(aten.remainder.Tensor, aten.remainder.Scalar)(_remainder)


@mask_rule(aten.abs.default)
def _absolute(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The absolute value of an integer, by its sign."""
    cases = elements.cases(node.args[0], index)
    if tensor(node).dtype not in EXACT or any(number(leaf) is not None for _, leaf in cases):
        return pointwise(bias=True)(elements, node, index)
    signs = [(And(c, leaf >= 0), leaf) for c, leaf in cases] + [
        (And(c, leaf < 0), -leaf) for c, leaf in cases
    ]
    return prune(tuple(signs))


mask_rule(
    *(aten.minimum.default, aten.maximum.default, aten.clamp.default, aten.clamp_min.default),
    *(aten.clamp_max.default, aten.exp.default, aten.log.default, aten.pow.Tensor_Scalar, aten.tanh.default),
)(pointwise())


def _logical(combine: Callable) -> Callable:
    """And, or, exclusive or, not: of truth values."""

    def element(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        logical = "logical" in node.target._opname
        # `mask & 2` is a number for a bool mask as well, and no truth value
        if not logical and any(tensor(n).dtype is not torch.bool for n in (*operands, node)):
            return pointwise()(elements, node, index)
        scalars = [sympy.sympify(bool(a)) for a in node.args if not isinstance(a, fx.Node)]
        values = [to_boolean(elements.cases(n, broadcast(node, n, index))) for n in operands]
        return combine(*values, *scalars)

    return element


for overload in ("Tensor", "Scalar"):
    for name, combine in {"and": And, "or": Or, "xor": Xor}.items():
        mask_rule(
            getattr(getattr(aten, f"__{name}__"), overload),
            getattr(getattr(aten, f"bitwise_{name}"), overload),
        )(_logical(combine))
mask_rule(aten.logical_and.default)(_logical(And))
mask_rule(aten.logical_or.default)(_logical(Or))
mask_rule(aten.logical_xor.default)(_logical(Xor))
mask_rule(aten.logical_not.default, aten.bitwise_not.default)(_logical(Not))


@mask_rule(
    *(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default),
    *(aten.lift_fresh_copy.default, aten.lift_fresh.default),
)
def _same(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element of the operand."""
    return elements.at(node.args[0], index)


@mask_rule(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)
def _converted(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element in another dtype, where nothing is lost."""
    source, dtype = tensor(node.args[0]).dtype, tensor(node).dtype
    if source is dtype:
        return elements.at(node.args[0], index)

    def convert(leaf: Leaf) -> Leaf:
        value = number(leaf)
        if value is not None:
            return leaf_of(one_element(value, source).to(dtype).item())
        if dtype.is_floating_point:
            return elements.unknown(node, index)[0][1]
        known = not leaf.has(sympy.core.function.AppliedUndef)
        if leaf.is_integer and (dtype in (torch.bool, torch.int64) or (dtype is torch.int32 and known)):
            return leaf
        raise MaskNotUnderstood(node, f"conversion from {source} to {dtype}")

    return tuple((c, convert(leaf)) for c, leaf in elements.cases(node.args[0], index))
