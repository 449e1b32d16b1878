"""Proofs about integer predicates, by Fourier-Motzkin elimination.

A predicate is a sympy Boolean over integer atoms: index symbols, sizes, `floor(a / c)` and applications of
unknown functions (two equal applications are one atom, nothing else is known of them). It is split into
branches of linear inequalities; a branch without a rational solution has no integer one, so "no branch has a
solution" is a proof. The converse is not claimed: every function here answers "not proved" when unsure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import sympy
from sympy.core.relational import Equality, Ge, Gt, Le, Lt, Relational, Unequality
from sympy.logic.boolalg import And, Boolean, Not, Or, to_nnf

# More branches or inequalities than this are not examined: the answer is then "not proved".
MAX_BRANCHES = 256
MAX_INEQUALITIES = 600

# `sum(coefficient * atom) + constant <= 0`
Inequality = tuple[frozenset[tuple[sympy.Expr, int]], int]


class TooComplex(Exception):
    """The predicate has more branches or inequalities than are worth examining."""


def difference(relation: Relational) -> sympy.Expr:
    """Left side minus right side of `relation`, with like terms collected."""
    return sympy.expand(relation.lhs - relation.rhs)


def implies(premise: Boolean, goal: Boolean, bounds: Iterable[Boolean] = ()) -> bool:
    """True if `premise` and `bounds` were proved to imply `goal` for all integer values of the atoms."""
    if goal is sympy.true or premise == goal:
        return True
    return impossible(And(premise, Not(goal)), bounds)


def impossible(condition: Boolean, bounds: Iterable[Boolean] = ()) -> bool:
    """True if `condition` and `bounds` were proved to have no integer solution."""
    try:
        return all(_eliminate(_inequalities(b), None) is None for b in _branches(And(condition, *bounds)))
    except TooComplex:
        return False


def greatest(expr: sympy.Expr, condition: Boolean, bounds: Iterable[Boolean] = ()) -> int | None:
    """A proved constant upper bound of the integer `expr` where `condition` and `bounds` hold, or None.

    The number is the smallest bound that the elimination gives. None also where the condition can never hold.
    """
    target = sympy.Dummy("target", integer=True)
    best: int | None = None
    try:
        for branch in _branches(And(condition, *bounds)):
            rest = _eliminate(_inequalities([*branch, sympy.Eq(target, expr, evaluate=False)]), target)
            if rest is None:
                continue
            limits = [-constant // dict(terms)[target] for terms, constant in rest if dict(terms)[target] > 0]
            if not limits:
                return None
            best = min(limits) if best is None else max(best, min(limits))
    except TooComplex:
        return None
    return best


def _branches(condition: Boolean) -> list[list[Relational]]:
    """Disjunctive normal form of `condition`; atoms that say nothing to the elimination are left out."""
    branches: list[list[Relational]] = []
    for branch in _expand(to_nnf(condition, simplify=False)):
        branches.append(branch)
        if len(branches) > MAX_BRANCHES:
            raise TooComplex
    return branches


def _expand(condition: Boolean) -> Iterator[list[Relational]]:
    if condition is sympy.false:
        return
    if isinstance(condition, Or):
        for arg in condition.args:
            yield from _expand(arg)
    elif isinstance(condition, And):
        # Single relations first: they multiply nothing.
        yield from _product(sorted(condition.args, key=lambda arg: isinstance(arg, Or)))
    elif isinstance(condition, Unequality) and not condition.has(sympy.core.function.AppliedUndef):
        yield [condition.lhs < condition.rhs]
        yield [condition.lhs > condition.rhs]
    elif isinstance(condition, (Le, Lt, Ge, Gt, Equality)):
        yield [condition]
    else:
        yield []  # true, or an atom of which nothing is known


def _product(conditions: list[Boolean]) -> Iterator[list[Relational]]:
    if not conditions:
        yield []
        return
    rest = None
    for head in _expand(conditions[0]):
        if rest is None:
            rest = []
            for tail in _product(conditions[1:]):
                rest.append(tail)
                if len(rest) > MAX_BRANCHES:
                    raise TooComplex
        for tail in rest:
            yield head + tail


def _inequalities(branch: Iterable[Boolean]) -> dict[frozenset, int] | None:
    """The relations of a branch, and what is known of their atoms, as inequalities; None: contradictory."""
    found: dict[frozenset, int] = {}
    atoms: list[sympy.Expr] = []
    seen: set[sympy.Expr] = set()

    def add(expr: sympy.Expr, strict: bool = False) -> bool:  # expr <= 0 or < 0; False on a contradiction
        linear = _linear(expr)
        if linear is None:
            return True  # not over integers: leaving a premise out is sound
        atoms.extend(atom for atom in linear[0] if atom not in seen)
        seen.update(linear[0])
        return _keep(found, linear[0], linear[1] + strict)  # coefficients are integers: < 0 is <= -1

    for relation in branch:
        if relation is sympy.true:
            continue
        if relation is sympy.false:
            return None
        expr = difference(relation)
        if isinstance(relation, (Ge, Gt, Equality)) and not add(-expr, isinstance(relation, Gt)):
            return None
        if isinstance(relation, (Le, Lt, Equality)) and not add(expr, isinstance(relation, Lt)):
            return None
    while atoms:
        atom = atoms.pop()
        # sympy turns `i >= 0` of a nonnegative symbol into `true`, so the bound has to be put back.
        if atom.is_nonnegative and not add(-atom, bool(atom.is_positive)):
            return None
        if not isinstance(atom, sympy.floor):
            continue
        numerator, denominator = sympy.fraction(sympy.together(atom.args[0]))
        if not (denominator.is_Integer and denominator > 0 and numerator.is_integer):
            continue
        if not (add(denominator * atom - numerator) and add(numerator - denominator * (atom + 1) + 1)):
            return None
    return found


def _linear(expr: sympy.Expr) -> tuple[dict[sympy.Expr, int], int] | None:
    """Integer coefficients by atom and the constant of `expr`; None if some atom is not known an integer."""
    terms = sympy.expand(expr).as_coefficients_dict()
    if not all(c.is_Rational for c in terms.values()):
        return None
    scale = math.lcm(*(int(c.q) for c in terms.values())) if terms else 1
    constant = int(terms.pop(sympy.S.One, 0) * scale)
    if not all(atom.is_integer for atom in terms):
        return None
    return {atom: int(c * scale) for atom, c in terms.items() if c != 0}, constant


def _keep(found: dict[frozenset, int], terms: dict[sympy.Expr, int], constant: int) -> bool:
    """Add an inequality, tightened to integers; False if it contradicts itself."""
    if not terms:
        return constant <= 0
    divisor = math.gcd(*terms.values())
    key = frozenset((atom, c // divisor) for atom, c in terms.items())
    constant = -(-constant // divisor)  # over integers the constant may be rounded up
    found[key] = max(found.get(key, constant), constant)
    return True


def _eliminate(found: dict[frozenset, int] | None, target: sympy.Symbol | None) -> list[Inequality] | None:
    """Eliminate all atoms but `target`; the inequalities left, or None if there is a contradiction."""
    while found is not None:
        atoms: dict[sympy.Expr, list[int]] = {}
        for terms in found:
            for atom, c in terms:
                if atom != target:
                    atoms.setdefault(atom, [0, 0])[c > 0] += 1
        if not atoms:
            if target is not None and _empty_interval(found, target):
                return None
            return list(found.items())
        atom = min(atoms, key=lambda a: (atoms[a][0] * atoms[a][1], str(a)))
        found = _without(found, atom)
    return None


def _without(found: dict[frozenset, int], atom: sympy.Expr) -> dict[frozenset, int] | None:
    """One Fourier-Motzkin step: the inequalities without `atom`; None on a contradiction."""
    above: list[tuple[dict, int]] = []
    below: list[tuple[dict, int]] = []
    rest: dict[frozenset, int] = {}
    for key, constant in found.items():
        terms = dict(key)
        c = terms.get(atom, 0)
        if c == 0:
            rest[key] = constant
        else:
            (above if c > 0 else below).append((terms, constant))
    for upper, upper_constant in above:
        for lower, lower_constant in below:
            a, b = -lower[atom], upper[atom]
            terms = {k: a * upper.get(k, 0) + b * lower.get(k, 0) for k in upper.keys() | lower.keys()}
            terms = {k: c for k, c in terms.items() if c != 0}
            if not _keep(rest, terms, a * upper_constant + b * lower_constant):
                return None
            if len(rest) > MAX_INEQUALITIES:
                raise TooComplex
    return rest


def _empty_interval(found: dict[frozenset, int], target: sympy.Symbol) -> bool:
    """True if the inequalities, over `target` alone, leave no integer."""
    high = [-k // dict(t)[target] for t, k in found.items() if dict(t)[target] > 0]
    low = [-(-k // -dict(t)[target]) for t, k in found.items() if dict(t)[target] < 0]
    return bool(high and low and min(high) < max(low))
