"""Run-time tests of a mask's conditions on data: linear in T, at most one host synchronisation each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean, Or, to_nnf
from torch import fx

from .elements import BATCH, COLUMN_INDEX, ROW_INDEX, tensor
from .predicates import difference, implies

if TYPE_CHECKING:
    from .facts import MaskFacts

Truth = Any  # bool, or a bool tensor without dims that is not read yet


def data_holds(facts: MaskFacts, fetch: Callable[[fx.Node], torch.Tensor]) -> bool:
    """True if all data conjuncts are seen to hold for every index on this step's tensors.

    Then the mask reduces to its other conjuncts. Costs time linear in T and at most one host synchronisation.

    Args:
        facts: the mask.
        fetch: gives the tensor of a node of `facts.linear`.
    """
    return bool(data_condition(facts, fetch))


def data_condition(
    facts: MaskFacts, fetch: Callable[[fx.Node], torch.Tensor], rows: torch.Tensor | None = None
) -> Truth:
    """What `data_holds` asks, as a tensor that is not read yet, or a bool where no tensor is asked.

    Args:
        facts: the mask.
        fetch: gives the tensor of a node of `facts.linear`.
        rows: (B,) or (1,), int64: how many rows of each sample count. Elements of rows and columns behind
            them are not asked about, where it is known which elements those read. None: all count.
    """
    if not facts.understood:
        return False
    data = [c.predicate for c in facts.conjuncts if c.kind == "data"]
    return _all(_holds(c, facts, fetch, rows) for c in data)


def first_column_open(facts: MaskFacts, fetch: Callable[[fx.Node], torch.Tensor]) -> bool:
    """True if it is seen that every row i has an attended column j <= i: its own, or the first.

    A row without any attends, under an additive mask of finfo.min, to all columns alike. Sufficient tests
    only, of the same cost as `data_holds`.
    """
    return bool(first_column_condition(facts, fetch))


def first_column_condition(facts: MaskFacts, fetch: Callable[[fx.Node], torch.Tensor]) -> Truth:
    """What `first_column_open` asks, as a tensor that is not read yet, or a bool where no tensor is asked."""
    if not facts.understood:
        return False
    finite = _all(_finite(leaf, facts, fetch) for leaf in facts.bias)
    if finite is False:
        return False
    found: list[Any] = []
    for column in (ROW_INDEX, sympy.S.Zero):
        condition = facts.predicate.subs(COLUMN_INDEX, column)
        terms = And.make_args(to_nnf(condition, simplify=False))
        static = And(*(t for t in terms if not t.has(AppliedUndef)))
        if implies(sympy.true, static, facts.bounds):
            found.append(_all(_holds(t, facts, fetch) for t in terms if t.has(AppliedUndef)))
    return _all([finite, _any(found)])


def _all(values: Any) -> Truth:
    """Conjunction that leaves tensors on their device; False as soon as one is known to be false."""
    result: Truth = True
    for value in values:
        if value is False:
            return False
        result = value if result is True else result if value is True else result & value
    return result


def _any(values: Any) -> Truth:
    result: Truth = False
    for value in values:
        if value is True:
            return True
        result = value if result is False else result if value is False else result | value
    return result


def _holds(condition: Boolean, facts: MaskFacts, fetch: Callable, rows: torch.Tensor | None = None) -> Truth:
    """Whether `condition` is seen to hold for all indices."""
    if condition in (sympy.true, sympy.false):
        return condition is sympy.true
    if isinstance(condition, And):
        return _all(_holds(c, facts, fetch, rows) for c in condition.args)
    if isinstance(condition, Or):
        return _any([_holds(c, facts, fetch, rows) for c in condition.args])
    if not isinstance(condition, Relational):
        return False
    terms = difference(condition).as_coefficients_dict()
    constant = terms.pop(sympy.S.One, sympy.S.Zero)
    known = all(isinstance(f, AppliedUndef) and f.func.__name__ in facts.linear for f in terms)
    if not known or not all(c.is_Integer for c in (constant, *terms.values())):
        return False
    values = [(int(c), _element(f, facts, fetch, rows)) for f, c in terms.items()]
    if any(v.dtype not in (torch.bool, torch.int64) for _, v in values):
        return False
    if len(values) == 1 and values[0][1].dtype is not torch.bool:
        ((factor, value),) = values
        return _compare(condition, value * factor + int(constant), value * factor + int(constant))
    # Of several values at different rows only the extremes are compared, in each batch entry.
    if any(v.shape[1] == 0 for _, v in values):
        return True
    extremes = [(c, v.amin(1).to(torch.int64), v.amax(1).to(torch.int64)) for c, v in values]
    low: Any = sum(c * (least if c > 0 else most) for c, least, most in extremes) + int(constant)
    high: Any = sum(c * (most if c > 0 else least) for c, least, most in extremes) + int(constant)
    return _compare(condition, low, high)


def _is_within_int64(dtype: torch.dtype) -> bool:
    """True for whole numbers, each of which is one of int64: but for the largest and for bools."""
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return whole and torch.iinfo(dtype).max <= torch.iinfo(torch.int64).max


def _element(
    applied: AppliedUndef, facts: MaskFacts, fetch: Callable, rows: torch.Tensor | None
) -> torch.Tensor:
    """All that `applied` may read: (B, N), B = 1 where it does not depend on the batch entry b.

    Bools stay bools: a causal mask that lies in a buffer is as large as the longest sequence squared.
    """
    value = fetch(facts.linear[applied.func.__name__])
    if _is_within_int64(value.dtype):
        value = value.to(torch.int64)
    for dim in reversed(range(value.dim())):
        if applied.args[dim].is_Integer:
            value = value.select(dim, int(applied.args[dim]))
    rest = [a for a in applied.args if not a.is_Integer]
    if rest.count(BATCH) == 1 and sum(a.has(BATCH) for a in rest) == 1:
        found = value.movedim(rest.index(BATCH), 0).reshape(value.shape[rest.index(BATCH)], -1)
    else:
        found = value.reshape(1, -1)
    by_row = [a for a in rest if a != BATCH] in ([ROW_INDEX], [COLUMN_INDEX])
    return _of_rows(found, rows) if rows is not None and by_row else found


def _of_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(B, N) with the last element that counts in the place of those behind it; the first if none counts."""
    rows = rows.max().reshape(1) if values.shape[0] == 1 else rows
    positions = torch.arange(values.shape[1], device=values.device)
    last = (rows.to(values.device) - 1).clamp_min(0).unsqueeze(1)
    return values.gather(1, torch.minimum(positions, last).expand(values.shape))


def _compare(relation: Relational, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Whether the relation to zero holds for all values between `low` and `high`."""
    if isinstance(relation, sympy.Le):
        return (high <= 0).all()
    if isinstance(relation, sympy.Lt):
        return (high < 0).all()
    if isinstance(relation, sympy.Ge):
        return (low >= 0).all()
    if isinstance(relation, sympy.Gt):
        return (low > 0).all()
    if isinstance(relation, sympy.Eq):
        return ((low == 0) & (high == 0)).all()
    # Unequal: a single value is its own low and high, so this is exact for it.
    return ((high < 0) | (low > 0)).all()


def _finite(leaf: sympy.Expr, facts: MaskFacts, fetch: Callable) -> Truth:
    """Whether a bias is far from finfo.min and finfo.max, so that it neither masks nor undoes a mask."""
    if leaf.is_number:
        dtype = tensor(facts.node).dtype
        return bool(abs(leaf) < _limit(facts, dtype if dtype.is_floating_point else torch.float16))
    if not isinstance(leaf, AppliedUndef) or leaf.func.__name__ not in facts.linear:
        return False
    value = fetch(facts.linear[leaf.func.__name__])
    if not value.dtype.is_floating_point:
        return False
    return (value.abs() < _limit(facts, value.dtype)).all()


def _limit(facts: MaskFacts, dtype: torch.dtype) -> float:
    """Of a bias: all of them together, each added several times, stay below half of the greatest number."""
    return float(torch.finfo(dtype).max / (16 * max(1, len(facts.bias))))
