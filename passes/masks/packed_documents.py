"""Masks of packed documents that are told apart by their positions."""

from __future__ import annotations

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from torch import fx

from .elements import COLUMN_INDEX, Elements, shape, tensor
from .predicates import difference
from .registry import aten, own, own_dim


def within_one_run(elements: Elements, conjunct: Boolean) -> tuple[sympy.Expr, sympy.Expr] | None:
    """A position and what it equals, if `conjunct` says that two rows lie in one run of positions.

    `run = cumsum(diff(p) != 1)` is constant only over rows where p increases by one from row to row, so
    `run[b, i] == run[b, j]` implies `p[b, j] == p[b, i] + j - i`. With this a mask that compares the
    positions of packed documents is proved causal, whatever positions the caller passes.
    """
    if not (isinstance(conjunct, sympy.Eq) and all(isinstance(s, AppliedUndef) for s in conjunct.args)):
        return None
    left, right = sorted(conjunct.args, key=lambda side: side.has(COLUMN_INDEX))
    positions = _positions_of_runs(elements.linear.get(left.func.__name__))
    *batch, row = left.args
    if positions is None or left.func != right.func or list(right.args[:-1]) != batch:
        return None
    col = right.args[-1]
    there, here = (elements.integer(positions, (*batch, at)) for at in (col, row))
    return (there, here + col - row) if isinstance(there, AppliedUndef) and there != here else None


def _positions_of_runs(node: fx.Node | None) -> fx.Node | None:
    """p, if `node` is `cumsum(diff(p, prepend=one element) != 1)` over the last dim, else None."""
    if node is None or node.target is not aten.cumsum.default or tensor(node).dtype is not torch.int64:
        return None
    jumps = node.args[0]
    if (
        jumps.target is not aten.ne.Scalar
        or jumps.args[1] != 1
        or jumps.args[0].target is not aten.diff.default
    ):
        return None
    differences = jumps.args[0]
    positions, prepend, last = differences.args[0], own(differences, "prepend"), len(shape(node)) - 1
    unit_steps = own(differences, "n") == 1 and own(differences, "append") is None and prepend is not None
    if not unit_steps or own_dim(differences) != last or own_dim(node) != last or shape(prepend)[last] != 1:
        return None
    return positions if tensor(positions).dtype is torch.int64 else None


def replaced(condition: Boolean, old: sympy.Expr, new: sympy.Expr) -> Boolean:
    """`condition` with `old` replaced and like terms of its relations collected."""
    if not condition.has(old):
        return condition
    changed = {r: r.func(sympy.expand(difference(r).subs(old, new)), 0) for r in condition.atoms(Relational)}
    return condition.xreplace(changed)
