"""Relations that are asked of extremes: they hold if they hold for every value between them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

import pytest
import sympy
import torch

from streambp_fx.passes.masks.at_run_time import _compare

X = sympy.Symbol("x", integer=True)
RELATIONS: dict[str, tuple[sympy.Rel, Callable[[int, int], bool]]] = {
    "<=": (sympy.Le(X, 0), operator.le),
    "<": (sympy.Lt(X, 0), operator.lt),
    ">=": (sympy.Ge(X, 0), operator.ge),
    ">": (sympy.Gt(X, 0), operator.gt),
    "==": (sympy.Eq(X, 0), operator.eq),
    "!=": (sympy.Ne(X, 0), operator.ne),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_all_values_between_the_extremes(name: str) -> None:
    relation, holds = RELATIONS[name]
    spans = [(a, b) for a, b in itertools.product(range(-2, 3), repeat=2) if a <= b]
    for low, high in spans:
        found = bool(_compare(relation, torch.tensor([low]), torch.tensor([high])))
        assert found == all(holds(v, 0) for v in range(low, high + 1)), (low, high)
    for (a, b), (c, d) in itertools.product(spans, repeat=2):  # in each batch entry
        both = bool(_compare(relation, torch.tensor([a, c]), torch.tensor([b, d])))
        assert both == all(holds(v, 0) for v in (*range(a, b + 1), *range(c, d + 1)))
