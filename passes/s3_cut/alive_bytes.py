"""Bytes a row of values that are stored by rows, and of all that is alive between two ops."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator

import sympy
import torch
from torch.fx import Node

from ..graph.facts import Axis, Facts, Kind, Role, shape_of, tensors_of
from ..graph.symbols import in_numbers
from ..s2_prove.scores import is_view


def row_axis(facts: Facts, node: Node) -> tuple[int, Axis] | None:
    """Dim and axis of the rows of a value that can be stored by rows, else None."""
    layout = facts.layouts.get(node)
    if layout is None or isinstance(node.meta["val"], (tuple, list)) or node in facts.local:
        return None
    found = [(d, a) for d, a in enumerate(layout) if a is not None]
    if len(found) != 1 or found[0][1].role is not Role.ROW or found[0][1].order is not None:
        return None
    sizes = [s for d, s in enumerate(shape_of(node)) if d != found[0][0]]
    return None if any(facts.sequence in s.free_symbols for s in sizes) else found[0]


def row_bytes(facts: Facts, node: Node) -> float:
    """Bytes of one row (of all samples) of a stored value; infinite if it cannot be stored by rows."""
    rows = row_axis(facts, node)
    if rows is None:
        return math.inf
    dim, axis = rows
    sizes = [s for d, s in enumerate(shape_of(node)) if d != dim] + [axis.outer, axis.inner]
    return in_numbers(sympy.Mul(*sizes), facts.values, unknown=2) * tensors_of(node)[0].element_size()


def lifetimes(facts: Facts, order: list[Node]) -> Iterator[tuple[int, int, float, Node]]:
    """Of each value the first and the last position before which it is alive, its bytes a row, and its base.

    A context before the rows is held anyway, and costs nothing. What a layer makes of it amid rows cannot be
    stored by rows: there is no cut while it is alive. What only branches on data ask at the end is stored
    wherever the cuts are, and costs them nothing.
    """
    position = {n: k for k, n in enumerate(order)}
    end = len(order)
    first = next((k for k, n in enumerate(order) if n not in facts.context), end)
    sources = [n for n in facts.nodes if n.op == "placeholder" and facts.kinds[n] is Kind.STREAM]
    for node in (*sources, *order):
        held = node in facts.context and isinstance(node.meta["val"], torch.Tensor)
        if not tensors_of(node) or (held and position.get(node, -1) < first):
            continue
        born = position.get(node, -1) + 1
        uses = [position.get(u, end) for u in node.users if u.op != "output" and u not in facts.asked]
        last = max(uses, default=born - 1)
        if last >= born:
            yield born, last, row_bytes(facts, node), _base(node)


def _base(node: Node) -> Node:
    """The value that a value is a view of, if it is one."""
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def alive_costs(lives: Iterable[tuple[int, int, float, Node]], end: int) -> list[float]:
    """Bytes a row alive just before each of the positions, and after the last, `end`."""
    change = [0.0] * (end + 2)
    barred = [0.0] * (end + 2)
    for born, last, cost, _ in lives:
        target = barred if math.isinf(cost) else change
        amount = 1 if math.isinf(cost) else cost
        target[born] += amount
        target[last + 1] -= amount
    costs, alive, bars = [], 0.0, 0.0
    for k in range(end + 1):
        alive += change[k]
        bars += barred[k]
        costs.append(math.inf if bars else alive)
    return costs


def own_costs(lives: list[tuple[int, int, float, Node]], places: list[int]) -> dict[int, float]:
    """Bytes a row that a cut at each of the places stores and no other one does.

    What is alive at several of them (an input of its own for each layer, made before the first) is stored
    once, however many cuts there are; of views of one value the value is stored.
    """
    found = dict.fromkeys(places, 0.0)
    ordered = sorted(found)

    def within(born: int, last: int) -> list[int]:
        return ordered[bisect.bisect_left(ordered, born) : bisect.bisect_right(ordered, last)]

    alive: dict[Node, set[int]] = {}
    for born, last, _, base in lives:
        alive.setdefault(base, set()).update(within(born, last))
    for born, last, cost, base in lives:
        if len(alive[base]) == 1:
            for place in within(born, last):
                found[place] += cost
    return found
