"""Attention masks: what can be proved about them, and their blocks, without ever building T x T values.

A mask is evaluated symbolically at one element (b, h, i, j), query row i and key column j, to a predicate:
row i attends to column j. What the schedule needs is proved on the predicate: that it is causal, that it has
a window, that it is plain causal apart from conditions on data (padding, packed documents). At run time
`data_holds` checks these conditions in time linear in T, and `materialize` builds the rows and columns of one
chunk where the mask itself is needed. Every proof is conservative: False means "not proved".

elements: the two walks over the graph. element_rules, fill_rules, view_rules: the rules of the ops.
predicates: the proofs. facts: what was proved. at_run_time: the tests at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import And, Boolean, Not, Or, to_nnf
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.facts import Reading
from . import fill_rules, view_rules  # noqa: F401  (they register rules)
from .at_run_time import data_condition, data_holds, first_column_condition, first_column_open
from .element_rules import is_masked
from .elements import (
    BATCH,
    COLUMN_INDEX,
    HEAD,
    ROW_INDEX,
    Blocks,
    Dims,
    Elements,
    MaskNotUnderstood,
    is_source,
    number,
    repeats_no_symbol,
    rule_for,
    same_size,
    shape,
    tensor,
    to_boolean,
    to_cases,
)
from .facts import Conjunct, MaskFacts
from .packed_documents import replaced, within_one_run
from .predicates import greatest, implies

__all__ = [
    "Conjunct",
    "MaskFacts",
    "MaskNotUnderstood",
    "analyze",
    "analyze_parts",
    "can_materialize",
    "constant",
    "data_condition",
    "data_holds",
    "first_column_condition",
    "first_column_open",
    "materialize",
]

CAUSAL = COLUMN_INDEX <= ROW_INDEX


# --- Analysis -------------------------------------------------------------------------------------


def analyze(
    node: fx.Node,
    sequence_symbol: sympy.Expr | torch.SymInt,
    is_linear: Callable[[fx.Node], bool] = repeats_no_symbol,
    row_dim: int = -2,
    col_dim: int = -1,
    true_attends: bool = True,
) -> MaskFacts:
    """Evaluate a mask symbolically and prove what can be proved. Never raises for a mask not understood.

    Args:
        node: the mask, bool or float, of any shape that has a row and a column dim.
        sequence_symbol: the sequence length T, as it occurs in the sizes.
        is_linear: says of a node whether its value has at most one sequence dim.
        row_dim: dim of the query positions i; of size T, or 1 where the mask is the same for all rows.
        col_dim: dim of the key positions j; of size T or 1.
        true_attends: False for a bool that is True where the score is masked out (the mask of `masked_fill`).
    """
    reading = Reading.ATTENDS if true_attends else Reading.HIDES
    return analyze_parts(((node, reading),), sequence_symbol, is_linear, row_dim, col_dim)


def analyze_parts(
    parts: Sequence[tuple[fx.Node, Reading]],
    sequence_symbol: sympy.Expr | torch.SymInt,
    is_linear: Callable[[fx.Node], bool] = repeats_no_symbol,
    row_dim: int = -2,
    col_dim: int = -1,
) -> MaskFacts:
    """The same of a mask of several parts: row i attends to column j where every part lets it.

    Args:
        parts: values of rows and columns and how each is read. Where they have dims before those two, they
            are the same dims, aligned from the right.
        sequence_symbol, is_linear, row_dim, col_dim: as for `analyze`.
    """
    length = sequence_symbol.node.expr if isinstance(sequence_symbol, torch.SymInt) else sequence_symbol
    bounds = (sympy.Le(ROW_INDEX, length - 1), sympy.Le(COLUMN_INDEX, length - 1))
    elements = Elements(is_linear, bounds)
    found: list[_Part] = []
    rank = max(len(shape(n)) for n, _ in parts)
    node = parts[0][0]
    try:
        for node, reading in parts:
            with _disable_current_modes():  # constants are folded with real tensors, whoever traces around us
                value = elements.at(node, _indices(node, length, row_dim, col_dim, rank))
            found.append(_predicate(node, value, reading))
        conjuncts = _conjuncts(elements, And(*(p.predicate for p in found)))
    except MaskNotUnderstood as error:
        return MaskFacts(node, False, str(error))
    node, bias = parts[0][0], tuple(leaf for p in found for leaf in p.bias)
    kinds = [p.kind for p in found]
    kind = "additive" if "additive" in kinds else kinds[0]
    predicate = And(*conjuncts)
    classified = tuple(_classify(c, bounds) for c in conjuncts)
    static = And(*(c.predicate for c in classified if c.kind != "data"))
    used = {f.func.__name__ for e in (predicate, *bias) for f in _applications(e)}
    return MaskFacts(
        node,
        True,
        kind=kind,
        predicate=predicate,
        causal=implies(predicate, CAUSAL, bounds),
        window=_window(predicate, bounds),
        plain=not bias and _exactly(predicate, CAUSAL, bounds),
        has_bias=bool(bias),
        conjuncts=classified,
        plain_without_data=not bias and _exactly(static, CAUSAL, bounds),
        infinite=all(p.infinite for p in found),
        finite=all(p.finite for p in found),
        linear={name: n for name, n in elements.linear.items() if name in used},
        bias=bias,
        bounds=bounds,
    )


def constant(node: fx.Node) -> float | None:
    """The number that every element of a value is, if it is made of numbers alone.

    Raises:
        MaskNotUnderstood: an op of it has no rule.
    """
    with _disable_current_modes():
        value = Elements(repeats_no_symbol).at(node, tuple(sympy.S.Zero for _ in shape(node)))
    cases = to_cases(value)
    found = number(cases[0][1]) if len(cases) == 1 else None
    return None if found is None else float(found)


def _indices(
    node: fx.Node, length: sympy.Expr, row_dim: int, col_dim: int, rank: int
) -> tuple[sympy.Expr, ...]:
    """Index symbols of the mask's dims; raises where its rows or columns are not the sequence.

    A value of fewer dims than `rank` is aligned from the right, as broadcasting does.
    """
    sizes = shape(node)
    ndim = len(sizes)
    if ndim == 1 and (row_dim, col_dim) == (-2, -1) and sizes[0] in (1, length):
        return (COLUMN_INDEX,)
    if ndim < 2 or not (-ndim <= row_dim < ndim and -ndim <= col_dim < ndim):
        raise MaskNotUnderstood(node, "no row and column dim")
    roles = {row_dim % ndim: ROW_INDEX, col_dim % ndim: COLUMN_INDEX}
    if len(roles) != 2 or any(sizes[d] not in (1, length) for d in roles):
        raise MaskNotUnderstood(node, f"rows and columns of {sizes} are not the sequence of {length}")
    names = iter((BATCH, HEAD, *(sympy.Symbol(f"d{d}", integer=True, nonnegative=True) for d in range(ndim))))
    before = rank - ndim
    named = {d: next(names) for d in range(rank) if d - before not in roles}
    return tuple(roles[d] if d in roles else named[before + d] for d in range(ndim))


@dataclass(frozen=True)
class _Part:
    """Of one part of a mask: see `MaskFacts`."""

    kind: str
    predicate: Boolean
    bias: tuple[sympy.Expr, ...] = ()
    infinite: bool = False
    finite: bool = False


def _predicate(node: fx.Node, value: Any, reading: Reading) -> _Part:
    """Which elements are attended, and what is added to the scores there."""
    dtype = tensor(node).dtype
    if reading is Reading.FACTOR:
        cases = to_cases(value)
        finite = all(not isinstance(leaf, float) or math.isfinite(leaf) for _, leaf in cases)
        known = not dtype.is_floating_point or all(isinstance(leaf, float) for _, leaf in cases)
        return _Part("factor", to_boolean(cases), finite=finite and known)
    if dtype is torch.bool:
        return _Part("bool", value if reading is Reading.ATTENDS else Not(value))
    if reading is Reading.HIDES or not dtype.is_floating_point:
        raise MaskNotUnderstood(node, f"a mask of dtype {dtype}")
    masked = [leaf for _, leaf in value if isinstance(leaf, float) and is_masked(leaf, dtype)]
    attended = [(c, leaf) for c, leaf in value if not (isinstance(leaf, float) and is_masked(leaf, dtype))]
    bias = tuple(sympy.sympify(leaf) for _, leaf in attended if leaf != 0)
    infinite = all(leaf == -math.inf for leaf in masked)
    return _Part("additive", Or(*(c for c, _ in attended)), bias, infinite=infinite)


def _conjuncts(elements: Elements, predicate: Boolean) -> list[Boolean]:
    """The conjuncts; where documents are told apart by their positions, positions become indices."""
    conjuncts = list(And.make_args(to_nnf(predicate, simplify=False)))
    for conjunct in list(conjuncts):
        known = within_one_run(elements, conjunct)
        if known is not None:
            conjuncts = [c if c == conjunct else replaced(c, *known) for c in conjuncts]
    flat = And.make_args(to_nnf(And(*conjuncts), simplify=False))
    return sorted((c for c in flat if c is not sympy.true), key=lambda c: (c.has(AppliedUndef), str(c)))


def _classify(conjunct: Boolean, bounds: tuple[Boolean, ...]) -> Conjunct:
    if conjunct.has(AppliedUndef):
        return Conjunct("data", conjunct)
    if _exactly(conjunct, CAUSAL, bounds):
        return Conjunct("causal", conjunct)
    window = _window(conjunct, bounds)
    if window is not None and _exactly(conjunct, _within(window), bounds):
        return Conjunct("window", conjunct, window)
    return Conjunct("other", conjunct)


def _within(window: int) -> Boolean:
    return sympy.Gt(COLUMN_INDEX, ROW_INDEX - window)


def _window(condition: Boolean, bounds: tuple[Boolean, ...]) -> int | None:
    distance = greatest(ROW_INDEX - COLUMN_INDEX, condition, bounds)
    return None if distance is None else distance + 1


def _exactly(condition: Boolean, other: Boolean, bounds: tuple[Boolean, ...]) -> bool:
    return implies(condition, other, bounds) and implies(other, condition, bounds)


def _applications(expr: sympy.Basic) -> set[AppliedUndef]:
    return expr.atoms(AppliedUndef)


# --- Blocks ---------------------------------------------------------------------------------------


def materialize(
    node: fx.Node,
    dims: Dims,
    fetch: Callable[[fx.Node], Any],
    is_linear: Callable[[fx.Node], bool] = repeats_no_symbol,
) -> torch.Tensor:
    """The block of `node` in the given intervals: what slicing the whole value would give.

    Only linear values are read whole; nothing larger than the block is made. Traceable with symbolic bounds.

    Args:
        node: the value, linear or with two sequence dims.
        dims: one entry a dim: None (whole) or (start, stop), 0 <= start <= stop <= size, ints or SymInts. A
            dim of size 1 is kept whole whatever its entry, as it is broadcast.
        fetch: gives the tensor of a linear node or a placeholder, and the number of a SymInt node.
        is_linear: as for `analyze`.

    Raises:
        MaskNotUnderstood: a value above the linear ones has an op, or a form of it, without a block rule.
    """
    return Blocks(fetch, is_linear).block(node, tuple(dims))


def can_materialize(
    node: fx.Node,
    is_linear: Callable[[fx.Node], bool] = repeats_no_symbol,
    cut: Sequence[int] | None = None,
) -> bool:
    """True if `materialize` has rules for any block of `node` in some dims; looks at no tensor.

    Args:
        node: the value.
        is_linear: as for `analyze`.
        cut: in which dims; None: in the last two.
    """
    ndim = len(shape(node))
    cut = range(ndim)[-2:] if cut is None else cut
    first: Dims = tuple((0, 1) if d in cut else None for d in range(ndim))
    pending = [(node, first)]
    seen: set[tuple] = set()
    while pending:
        n, dims = pending.pop()
        try:
            dims = same_size(dims, shape(n))
            if (n, dims) in seen or is_source(n, is_linear):
                continue
            seen.add((n, dims))
            pending.extend(rule_for(n).operands(n, dims))
        except MaskNotUnderstood:
            return False
    return True
