"""context_cuts: where a context is cut, so that it is computed again piece by piece in the backward.

A tower of layers that has no rows of the sequence (see NOTE [context] in `s2_prove.axes`) is recomputed as
checkpointing would do it: what is kept lies between its layers, where a single value is alive.
"""

from __future__ import annotations

import itertools

import sympy
import torch
from torch.fx import Node

from ..graph.facts import Facts, shape_of
from ..graph.symbols import in_numbers


def context_cuts(facts: Facts, order: list[Node]) -> list[int]:
    """Positions of cuts among the nodes of a context that `order` begins with.

    Of positions side by side where one value is alive, the one where it has the fewest bytes is taken. Behind
    the last node of the context there is a cut in any case: what follows has rows.
    """
    end = next((k for k, n in enumerate(order) if n not in facts.context), len(order))
    last = _last_uses(order, end)
    alive: set[Node] = set()
    single: dict[int, float] = {}
    for k, node in enumerate(order[:end]):
        alive = {n for n in alive if last[n] > k}
        if last[node] > k:
            alive.add(node)
        if len(alive) == 1 and isinstance((value := next(iter(alive))).meta["val"], torch.Tensor):
            size = in_numbers(sympy.Mul(*shape_of(value)), facts.values, unknown=2)
            single[k + 1] = size * value.meta["val"].element_size()
    runs = itertools.groupby(enumerate(single), key=lambda pair: pair[1] - pair[0])
    found = {min((k for _, k in run), key=lambda k: (single[k], -k)) for _, run in runs}
    return sorted({*found, end} - {0})


def _last_uses(order: list[Node], end: int) -> dict[Node, int]:
    """Of each value of a context the position of the last node that reads it; `end` if others do."""
    position = {n: k for k, n in enumerate(order[:end])}
    return {n: max((position.get(u, end) for u in n.users), default=k) for n, k in position.items()}
