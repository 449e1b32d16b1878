"""What the ops that masks are made of do to one element and to one block: one small rule an op.

A rule is a function `(elements, node, index) -> value` under `@mask_rule(op, ...)`. Its block side is the
pair `operands` (which intervals of which operands a block needs) and `build`; by default operands are aligned
as broadcasting does and the op itself is called on their blocks. See `mask_elements` for the two walks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import And, Boolean, Not, Or, Xor
from torch import fx

from .mask_elements import (
    MAX_CASES,
    RULES,
    Blocks,
    Cases,
    Dims,
    Elements,
    Index,
    Leaf,
    MaskNotUnderstood,
    MaskRule,
    is_tensor,
    leaf_of,
    number,
    prune,
    shape,
    tensor,
    to_boolean,
)

aten = torch.ops.aten

# Integer arithmetic may be exact in these; whether what it makes fits is looked at (`mask_elements._fits`).
EXACT = (torch.int32, torch.int64)


# --- Blocks: the defaults -------------------------------------------------------------------------


def aligned(node: fx.Node, dims: Dims) -> list[tuple[fx.Node, Dims]]:
    """All tensor operands, their dims aligned from the right as broadcasting does."""
    return [(n, broadcast(node, n, dims)) for n in node.all_input_nodes if is_tensor(n)]


def broadcast(node: fx.Node, operand: fx.Node, values: tuple) -> tuple:
    """The entries of `values` (one a dim of `node`) for the dims of `operand`, aligned from the right.

    Raises:
        MaskNotUnderstood: the sizes of the operand do not broadcast to those of `node`.
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


def mask_rule(
    *ops: Any, operands: Callable = aligned, build: Callable = call
) -> Callable[[Callable], Callable]:
    """Register the decorated element rule, with its block side, for `ops`."""

    def register(element: Callable) -> Callable:
        for op in ops:
            RULES[op] = MaskRule(element, operands, build)
        return element

    return register


def own(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument `name` of the node's op, whether passed by position, by name or not at all."""
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if not argument.kwarg_only and position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def own_dim(node: fx.Node, name: str = "dim") -> int:
    """The argument `name` as a non-negative dim of the first operand."""
    return own(node, name, 0) % len(shape(node.args[0]))


def scalar_leaf(node: fx.Node, arg: Any) -> Leaf:
    """A number, SymInt or SymInt node among the arguments as a leaf.

    Raises:
        MaskNotUnderstood: it is not a number.
    """
    if isinstance(arg, fx.Node):
        arg = arg.meta.get("val")
    if isinstance(arg, torch.SymInt):
        return arg.node.expr
    if isinstance(arg, (bool, int, float)):
        return leaf_of(arg)
    raise MaskNotUnderstood(node, f"argument {arg} is not a number")


# --- Element by element ---------------------------------------------------------------------------


def _constant(value: float | int, dtype: torch.dtype, ndim: int = 0) -> torch.Tensor:
    return torch.full((1,) * ndim, value, dtype=dtype, device="cpu")


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
        like = {n: _constant(v, tensor(n).dtype, tensor(n).dim()) for n, v in known.items()}
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
        plain = node.target is aten.add.Tensor and "alpha" not in node.kwargs
        if not plain or tensor(node).dtype is torch.float16:  # a bias of 32752 is within reach of float16
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
        if not logical and any(tensor(n).dtype is not torch.bool for n in operands):
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
            return leaf_of(_constant(value, source).to(dtype).item())
        if dtype.is_floating_point:
            return elements.unknown(node, index)[0][1]
        known = not leaf.has(sympy.core.function.AppliedUndef)
        if leaf.is_integer and (dtype in (torch.bool, torch.int64) or (dtype is torch.int32 and known)):
            return leaf
        raise MaskNotUnderstood(node, f"conversion from {source} to {dtype}")

    return tuple((c, convert(leaf)) for c, leaf in elements.cases(node.args[0], index))


# --- Choices and fills ----------------------------------------------------------------------------


def _choice(elements: Elements, node: fx.Node, index: Index, condition: fx.Node, yes: Any, no: Any) -> Cases:
    """Cases of `yes where condition else no`, in the dtype of `node`."""

    def cases(arg: Any) -> Cases:
        if is_tensor(arg):
            return elements.cases(arg, broadcast(node, arg, index))
        return ((sympy.true, scalar_leaf(node, arg)),)

    holds = to_boolean(elements.cases(condition, broadcast(node, condition, index)))
    chosen = [(And(holds, c), leaf) for c, leaf in cases(yes)]
    chosen += [(And(Not(holds), c), leaf) for c, leaf in cases(no)]
    return tuple((c, _stored(node, leaf)) for c, leaf in chosen)


def _stored(node: fx.Node, leaf: Leaf) -> Leaf:
    """`leaf` as an element of `node`."""
    dtype = tensor(node).dtype
    value = number(leaf)
    if value is not None:
        return leaf_of(_constant(value, dtype).item())
    if (dtype in EXACT and leaf.is_integer) or (dtype.is_floating_point and not leaf.is_integer):
        return leaf
    raise MaskNotUnderstood(node, f"an unknown value stored as {dtype}")


@mask_rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """One of two elements, by a condition."""
    return _choice(elements, node, index, *node.args)


@mask_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The element or a constant, by a condition."""
    source, condition, value = node.args
    return _choice(elements, node, index, condition, value, source)


def _band_block(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    (block,) = operands.values()
    row, col = ((0 if d is None else d[0]) for d in dims[-2:])
    rows = torch.arange(row, row + block.shape[-2], device=block.device)
    cols = torch.arange(col, col + block.shape[-1], device=block.device)
    distance = cols - rows.unsqueeze(-1)
    diagonal = blocks.scalar(own(node, "diagonal"))
    kept = distance >= diagonal if node.target is aten.triu.default else distance <= diagonal
    return torch.where(kept, block, torch.zeros((), dtype=block.dtype, device=block.device))


@mask_rule(aten.triu.default, aten.tril.default, build=_band_block)
def _band(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The element on one side of a diagonal, zero on the other."""
    diagonal = scalar_leaf(node, own(node, "diagonal"))
    distance = index[-1] - index[-2]
    kept = distance >= diagonal if node.target is aten.triu.default else distance <= diagonal
    cases = elements.cases(node.args[0], index)
    zero = _stored(node, sympy.S.Zero)
    return (*((And(kept, c), leaf) for c, leaf in cases), (Not(kept), zero))


def block_sizes(blocks: Blocks, node: fx.Node, dims: Dims, sizes: Any) -> list[Any]:
    """Sizes of a block: of its intervals, else what the argument `sizes` of the op says."""
    return [blocks.scalar(s) if d is None else d[1] - d[0] for s, d in zip(sizes, dims, strict=True)]


def _fill(node: fx.Node) -> Any:
    """The value that a full-like op writes."""
    name = node.target._opname
    return 1 if "ones" in name else 0 if "zeros" in name else own(node, "fill_value")


def _filled(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    sizes = block_sizes(blocks, node, dims, own(node, "size"))
    value, like = blocks.scalar(_fill(node)), tensor(node)
    return torch.full(sizes, value, dtype=like.dtype, device=like.device)


def _filled_element(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A constant."""
    return ((sympy.true, _stored(node, scalar_leaf(node, _fill(node)))),)


mask_rule(
    *(aten.full.default, aten.ones.default, aten.zeros.default),
    *(aten.new_full.default, aten.new_ones.default, aten.new_zeros.default),
    operands=lambda node, dims: [],
    build=_filled,
)(_filled_element)
mask_rule(aten.full_like.default, aten.ones_like.default, aten.zeros_like.default)(_filled_element)


@mask_rule(aten.scalar_tensor.default)
def _scalar(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A number."""
    return ((sympy.true, _stored(node, scalar_leaf(node, node.args[0]))),)
