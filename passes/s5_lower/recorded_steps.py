"""recorded_steps: a recurrence that a program runs and differentiates is run once, and recorded by autograd.

The forward of a chunk is computed again before its VJP. The VJP of a recurrence runs the recurrence once more
inside, which a record of the first run spares. It is held from one to the other, so it is made only where the
program's peak is not much higher for it. See NOTE [a recorded step].
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import sympy
from torch.fx import Graph, Node

from ..cost.program import tensor_bytes
from ..cost.recurrences import kept_and_inner_bytes_at
from ..cost.storages import Storages
from ..graph.ops.recurrence import RECURRENCE_KEPT, RECURRENCE_KEPT_VJP, RECURRENCE_STEP, RECURRENCE_VJP
from .rewriting import Program

#: How much of a program's peak the record may take beyond it.
MORE = 0.1


def record_steps(graph: Graph, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Record each step of a recurrence that is differentiated with the same operands, where that is cheap.

    Args:
        graph: of a traced program.
        sizes: for which the peak is looked for; a symbol that is not there is taken to be 1.
    """
    found = graph.find_nodes(op="call_function", target=RECURRENCE_STEP)
    steps = {tuple(map(_hashable, n.args)): n for n in found}
    for vjp in graph.find_nodes(op="call_function", target=RECURRENCE_VJP) if steps else ():
        step = steps.get(tuple(map(_hashable, vjp.args[:5])))
        if step is not None and _is_cheap(graph, step, vjp, sizes):
            _record(graph, step, vjp)


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _is_cheap(graph: Graph, step: Node, vjp: Node, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """True if what is alive between a step and its VJP, and the record, is not much more than the peak."""

    def number(size: sympy.Expr) -> int:
        return int(sympy.sympify(size).subs({s: sizes.get(s, 1) for s in size.free_symbols}))

    storages = Storages(graph)
    made = {k: number(tensor_bytes(v)) if storages.is_inside(k) else 0 for k, v in storages.first.items()}
    alive = list(storages.alive(made, 0))
    begin, end = storages.position[step], storages.position[vjp]
    record, inner = kept_and_inner_bytes_at(step, vjp, number)
    peak = max(*alive, alive[end] + inner)
    return max(alive[begin : end + 1]) + record <= (1 + MORE) * peak


def _record(graph: Graph, step: Node, vjp: Node) -> None:
    program = Program(graph)
    kept = program.insert(step, step, RECURRENCE_KEPT, *step.args, vjp.args[-1])
    step.replace_all_uses_with(kept)
    graph.erase_node(step)
    record = program.insert(vjp, vjp, operator.getitem, kept, 2)
    found = program.insert(vjp, vjp, RECURRENCE_KEPT_VJP, *vjp.args, record)
    vjp.replace_all_uses_with(found)
    graph.erase_node(vjp)
