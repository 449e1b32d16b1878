"""Transfer functions: what each op makes of what is known of scores. See NOTE [what is known of scores]."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.facts import Reading, Role, tensors_of
from ..graph.purity import is_random
from .scores import (
    ORDINARY,
    SOFTMAXES,
    Call,
    Hidden,
    Score,
    Scores,
    normalised_dim,
    transfer,
    without_views,
)

aten = torch.ops.aten
# Numbers that scores may be multiplied by, or that may be added to them, without becoming extreme.
MODERATE = 2.0**12


@transfer(aten.dropout.default)
def dropout(scores: Scores, node: Node, call: Call) -> Score | None:
    """Zeros stay zeros; a score that is dropped becomes zero, so what was masked out may be seen again."""
    known = scores.of(call["input"])
    keeps = known is not None and (not is_random(node) or known.hidden in (Hidden.ZERO, Hidden.UNKNOWN))
    return known if keeps else None


# ---- products: where scores come from


@transfer(aten.matmul.default, aten.bmm.default, aten.mm.default)
def product(scores: Scores, node: Node, call: Call) -> Score | None:
    """Rows times columns."""
    return ORDINARY if node in scores.facts.mixings else None


@transfer(aten.gather.default)
def gather(scores: Scores, node: Node, call: Call) -> Score | None:
    """Numbers of each row at places that data says: of a product, as scores are. Others may be infinite."""
    source = without_views(call["self"])
    of_product = isinstance(source, Node) and source.target in PRODUCTS
    return ORDINARY if node in scores.facts.mixings and of_product else None


@transfer(aten.baddbmm.default)
def baddbmm(scores: Scores, node: Node, call: Call) -> Score | None:
    """A product, and data that is added to it."""
    alpha, beta = scores.number(call["alpha"]), scores.number(call["beta"])
    if node not in scores.facts.mixings or alpha is None or beta is None or not abs(alpha) <= MODERATE:
        return None
    return ORDINARY if beta == 0 else _with(scores, ORDINARY, call["self"], beta)


PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.mm.default, aten.linear.default)


# ---- sums


@transfer(aten.add.Tensor, aten.add.Scalar)
def add(scores: Scores, node: Node, call: Call) -> Score | None:
    """`self + alpha * other`."""
    return _sum(scores, call["self"], call["other"], scores.number(call["alpha"]))


@transfer(aten.sub.Tensor, aten.sub.Scalar)
def sub(scores: Scores, node: Node, call: Call) -> Score | None:
    """`self - alpha * other`."""
    alpha = scores.number(call["alpha"])
    return _sum(scores, call["self"], call["other"], None if alpha is None else -alpha)


def _sum(scores: Scores, left: Any, right: Any, factor: float | None) -> Score | None:
    if factor is None or not math.isfinite(factor):
        return None
    if scores.of(left) is None:
        known = _scaled(scores, scores.of(right), factor)
        return None if known is None else _with(scores, known, left, 1.0)
    known = scores.of(left)
    assert known is not None
    return _with(scores, known, right, factor)


def _with(scores: Scores, known: Score, other: Any, factor: float) -> Score | None:
    """`known + factor * other`."""
    number = scores.number(other)
    if number is not None:
        return _shifted(known, number * factor)
    if not isinstance(other, Node):
        return None
    second = scores.of(other)
    if second is not None:
        second = _scaled(scores, second, factor)
        return None if second is None else _added(scores, known, second)
    if scores.is_data(other):
        return _with_data(scores, known, other, factor)
    if scores.facts.has_columns(
        other
    ):  # streamed, and nothing is known of it: it may be as large as one likes
        return replace(known, finite=False, ordinary=False) if known.hidden is Hidden.INFINITE else None
    return _shifted(known, 1.0) if abs(factor) <= MODERATE else None  # it has a number a row, or a head


def _shifted(known: Score, number: float) -> Score | None:
    """A moderate number is added to every element."""
    if number == 0:
        return known
    if not abs(number) <= MODERATE:
        return None
    return replace(known, hidden=Hidden.UNKNOWN, parts=()) if known.hidden is Hidden.ZERO else known


def _added(scores: Scores, a: Score, b: Score) -> Score | None:
    """The sum of two values of rows and columns."""
    ordinary, finite = a.is_plain and b.is_plain, a.finite and b.finite
    kinds = {a.hidden, b.hidden}
    if kinds <= {Hidden.UNKNOWN, Hidden.ZERO}:
        same = a.hidden is b.hidden is Hidden.ZERO and a.parts == b.parts
        return replace(a if same else ORDINARY, ordinary=ordinary, finite=finite)
    masked = [s for s in (a, b) if s.hidden in (Hidden.LOW, Hidden.INFINITE)]
    if len(masked) == 2:
        return _both(scores, a, b, ordinary, finite)
    return replace(masked[0], ordinary=ordinary, finite=finite)


def _both(scores: Scores, a: Score, b: Score, ordinary: bool, finite: bool) -> Score | None:
    """Two masks on one value: what either hides is low."""
    infinite = [replace(s, ordinary=False, finite=False) for s in (a, b) if s.hidden is Hidden.INFINITE]
    parts = scores.join(a.parts, b.parts)
    joined = None
    if parts is not None:
        joined = Score(Hidden.INFINITE if len(infinite) == 2 else Hidden.LOW, parts, ordinary, False)
    # minus infinity says enough by itself: it does not matter then what the other mask does to visible ones
    if (infinite and len(infinite) + (joined is not None) > 1) or joined is None:
        usable = [*infinite, *([joined] if joined is not None and len(infinite) == 2 else [])]
        best = min(usable, key=lambda s: scores.width(s.parts), default=None)
        if best is not None and (joined is None or scores.width(best.parts) < math.inf):
            return best
    return joined


def _with_data(scores: Scores, known: Score, mask: Node, factor: float) -> Score | None:
    """A mask or a bias is added: `known + factor * mask`."""
    part = (mask, Reading.ATTENDS)
    found = scores.hides(part) if tensors_of(mask)[0].is_floating_point() else None
    if found is None:
        keeps = known.hidden is Hidden.INFINITE  # plus infinity would make NaN of it, in eager as well
        return replace(known, ordinary=False, finite=False) if keeps and factor > 0 else None
    if found.predicate is sympy.true:
        return _biased(scores, known, part, factor)
    as_is = factor == 1 or not found.bias
    if found.infinite and factor > 0:
        added = Score(Hidden.INFINITE, (part,), as_is, False)
    elif factor >= 1:
        added = Score(Hidden.LOW, (part,), as_is, False)
    else:
        return None
    if known.hidden in (Hidden.UNKNOWN, Hidden.ZERO):
        return replace(added, ordinary=known.ordinary and added.ordinary)
    return _both(scores, known, added, known.ordinary and added.ordinary, False)


def _biased(scores: Scores, known: Score, part: tuple[Node, Reading], factor: float) -> Score | None:
    """A bias that masks nothing for certain: how large it is, is asked when the step runs."""
    if known.hidden is Hidden.ZERO:
        return Score(ordinary=False, finite=False)
    if known.hidden is Hidden.INFINITE:
        return replace(known, ordinary=False, finite=False)
    parts = scores.join(known.parts, (part,)) if abs(factor) <= 1 else None
    if parts is None:
        return None if known.hidden is Hidden.LOW else replace(known, ordinary=False, finite=False)
    return replace(known, parts=parts, finite=False)


# ---- products with factors


@transfer(aten.mul.Scalar, aten.mul.Tensor)
def mul(scores: Scores, node: Node, call: Call) -> Score | None:
    """`self * other`, either way round."""
    left, right = call["self"], call["other"]
    if scores.of(left) is None:
        left, right = right, left
    known, other, number = scores.of(left), scores.of(right), scores.number(right)
    if known is None:
        return None
    if number is not None:
        return _scaled(scores, known, number)
    if other is not None:
        return _multiplied(known, other)
    if scores.is_data(right):
        return _with_factor(scores, known, right)
    return None if scores.facts.has_columns(right) else _times_unknown(known)


@transfer(aten.div.Scalar, aten.div.Tensor)
def div(scores: Scores, node: Node, call: Call) -> Score | None:
    """`self / other`; by what differs from column to column nothing is known."""
    known, number = scores.of(call["self"]), scores.number(call["other"])
    if known is None or number is not None:
        return _scaled(scores, known, 1 / number) if number else None
    other = call["other"]
    if scores.of(other) is not None or scores.facts.has_columns(other) or _differs_by_column(scores, other):
        return None
    return _times_unknown(known)


@transfer(aten.neg.default)
def neg(scores: Scores, node: Node, call: Call) -> Score | None:
    """`-self`."""
    return _scaled(scores, scores.of(call["self"]), -1.0)


def _scaled(scores: Scores, known: Score | None, number: float) -> Score | None:
    """Every element times a number. What is low stays low if it does not come nearer to zero."""
    if known is None or not abs(number) <= MODERATE:
        return None
    if known.hidden is Hidden.INFINITE:
        return known if number > 0 else None
    if known.hidden is Hidden.LOW:
        found = scores.hides(*known.parts)
        as_is = known.ordinary and (number == 1 or (found is not None and not found.bias))
        return replace(known, ordinary=as_is) if number >= 1 else None
    if known.hidden is Hidden.UNKNOWN and known.parts and abs(number) > 1:
        return Score(ordinary=False, finite=known.finite)
    return known


def _multiplied(a: Score, b: Score) -> Score | None:
    """The product of two values of rows and columns."""
    if not (a.finite and b.finite):
        return None
    zero = next((s for s in (a, b) if s.hidden is Hidden.ZERO), None)
    return replace(zero or ORDINARY, ordinary=a.is_plain and b.is_plain)


def _times_unknown(known: Score) -> Score | None:
    """Times a number a row or a head, whose sign is not known."""
    if known.hidden is Hidden.UNKNOWN:
        return replace(known, parts=(), ordinary=known.is_plain)
    return known if known.hidden is Hidden.ZERO else None


def _differs_by_column(scores: Scores, node: Any) -> bool:
    """True unless the last dim of a value without a gradient has one element, or no dim."""
    if not scores.is_data(node):
        return False
    shape = tensors_of(node)[0].shape
    return len(shape) > 0 and not (isinstance(shape[-1], int) and shape[-1] == 1)


def _with_factor(scores: Scores, known: Score, factor: Node) -> Score | None:
    """Times data: zeros of it hide."""
    if known.hidden in (Hidden.LOW, Hidden.INFINITE) or not known.finite:
        return None
    part = (factor, Reading.FACTOR)
    found = scores.hides(part)
    whole_numbers = not tensors_of(factor)[0].is_floating_point()
    finite = whole_numbers or (found is not None and found.finite)
    if known.hidden is Hidden.ZERO and (found is None or scores.is_tight(known.parts)):
        return replace(known, ordinary=False, finite=finite) if finite else None
    if found is None:
        return None
    return Score(Hidden.ZERO, (part,), ordinary=known.ordinary and finite, finite=finite)


# ---- filling


@transfer(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(scores: Scores, node: Node, call: Call) -> Score | None:
    """`value` where `mask` is true."""
    return _filled(scores, node, call["self"], call["mask"], Reading.HIDES, scores.number(call["value"]))


@transfer(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(scores: Scores, node: Node, call: Call) -> Score | None:
    """One value or the other; one of them a number."""
    first, second = call["self"], call["other"]
    number = scores.number(second)
    if number is not None:
        return _filled(scores, node, first, call["condition"], Reading.ATTENDS, number)
    return _filled(scores, node, second, call["condition"], Reading.HIDES, scores.number(first))


def _filled(
    scores: Scores, node: Node, source: Any, mask: Any, reading: Reading, number: float | None
) -> Score | None:
    """`source`, with a number where the mask hides."""
    dtype = tensors_of(node)[0].dtype
    usable = number is not None and scores.is_data(mask) and tensors_of(mask)[0].dtype == torch.bool
    if not usable or not dtype.is_floating_point:
        return None
    assert number is not None
    part = (mask, reading)
    if scores.hides(part) is None:
        return None
    known = scores.of(source)
    ordinary, finite = known is not None and known.ordinary, known is not None and known.finite
    if number == -math.inf or number <= torch.finfo(dtype).min / 2:
        kind = Hidden.INFINITE if number == -math.inf else Hidden.LOW
        added = Score(kind, (part,), ordinary, False)
        if known is not None and known.hidden in (Hidden.LOW, Hidden.INFINITE):
            if added.hidden is Hidden.LOW:  # it takes the place of what was minus infinity
                known = replace(known, hidden=Hidden.LOW)
            return _both(scores, known, added, ordinary, False)
        return _keep_bias(scores, known, added)
    if number == 0:
        if known is not None and known.hidden is Hidden.ZERO and scores.is_tight(known.parts):
            return known
        return Score(Hidden.ZERO, (part,), ordinary, finite)
    if known is None or known.hidden is not Hidden.UNKNOWN or not abs(number) <= MODERATE:
        return None
    return known


def _keep_bias(scores: Scores, known: Score | None, added: Score) -> Score | None:
    """Masked out, after a bias was added whose size is asked when the step runs."""
    if (
        known is None
        or not known.parts
        or known.hidden is not Hidden.UNKNOWN
        or added.hidden is Hidden.INFINITE
    ):
        return added
    parts = scores.join(added.parts, known.parts)
    return replace(added, ordinary=False) if parts is None else replace(added, parts=parts)


# ---- functions of one element


@transfer(aten.relu.default)
def relu(scores: Scores, node: Node, call: Call) -> Score | None:
    """What is low becomes zero, and zero stays."""
    known = scores.of(call["self"])
    if known is None or known.hidden is Hidden.UNKNOWN:
        return known
    return Score(Hidden.ZERO, known.parts, known.ordinary, finite=known.ordinary)


@transfer(aten.exp.default, aten.exp2.default)
def exp(scores: Scores, node: Node, call: Call) -> Score | None:
    """What is low becomes zero; the rest may become infinite."""
    known = scores.of(call["self"])
    if known is None:
        return None
    if known.hidden in (Hidden.LOW, Hidden.INFINITE):
        return Score(Hidden.ZERO, known.parts, ordinary=False, finite=False)
    return Score(ordinary=False, finite=False)


@transfer(aten.clamp.default, aten.clamp_min.default)
def clamp_min(scores: Scores, node: Node, call: Call) -> Score | None:
    """A bound as low as what is masked out: minus infinity becomes low, and all else stays."""
    known, bound = scores.of(call["self"]), scores.number(call["min"])
    if call.get("max") is not None:
        return None
    low = bound is not None and bound <= torch.finfo(tensors_of(node)[0].dtype).min / 2
    if known is None or not low or known.hidden is not Hidden.INFINITE:
        return known if low else None
    return replace(known, hidden=Hidden.LOW)


@transfer(aten.sigmoid.default)
def sigmoid(scores: Scores, node: Node, call: Call) -> Score | None:
    """What is low becomes zero; all of it is between 0 and 1."""
    known = scores.of(call["self"])
    if known is not None and known.hidden in (Hidden.LOW, Hidden.INFINITE):
        return Score(Hidden.ZERO, known.parts)
    return ORDINARY


@transfer(
    aten.abs.default, aten.square.default, aten.tanh.default, aten.sin.default, aten.erf.default,
    aten.gelu.default, aten.silu.default,
)  # fmt: skip
def zero_at_zero(scores: Scores, node: Node, call: Call) -> Score | None:
    """Functions that are zero at zero, with a finite derivative there."""
    known = scores.of(call["self"])
    if known is None or known.hidden in (Hidden.LOW, Hidden.INFINITE):
        return None
    return known if known.hidden is Hidden.ZERO else Score(ordinary=known.is_plain, finite=known.finite)


@transfer(aten.pow.Tensor_Scalar)
def power(scores: Scores, node: Node, call: Call) -> Score | None:
    """A power of one or more: zero at zero, with a finite derivative."""
    exponent = call["exponent"]
    moderate = isinstance(exponent, (int, float)) and 1 <= exponent <= 8
    return zero_at_zero(scores, node, call) if moderate else None


# ---- over columns


@transfer(*SOFTMAXES)
def softmax(scores: Scores, node: Node, call: Call) -> Score | None:
    """Over columns: what is masked out has no weight; its logarithm stays masked out."""
    layout, dim = scores.facts.layouts[node], normalised_dim(node)
    axis = layout[dim] if layout is not None and dim is not None else None
    if axis is None or axis.role is not Role.COLUMN:
        return None
    known = scores.of(call["self"])
    logarithm = node.target in (aten.log_softmax.int, aten._log_softmax.default)
    if known is None or not known.is_masked_out:
        return None if logarithm else ORDINARY
    return replace(known, finite=False) if logarithm else Score(Hidden.ZERO, known.parts)
