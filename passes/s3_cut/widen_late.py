"""widen_late: values are made as late as they can be, where they are wider than what they are made of.

What is alive between two layers is what a cut there stores. The logits of a teacher model, made before the
student's layers run and read after them, would be alive at each of its cuts; made late, the teacher's hidden
states are alive instead.
"""

from __future__ import annotations

import math
from fractions import Fraction

from torch.fx import Node

from ..graph.facts import Facts, Kind, operands
from .alive_bytes import row_bytes


def widen_late(facts: Facts) -> Facts:
    """Move each widening op, and what it needs, to just before its first reader; `facts.nodes` follow."""
    graph = facts.module.graph
    position = {n: Fraction(k) for k, n in enumerate(graph.nodes)}
    for node in reversed(facts.nodes):
        if node.op != "call_function" or not node.users or not _widens(facts, node):
            continue
        reader = min(node.users, key=position.__getitem__)
        if reader.prev is node:
            continue
        # between its neighbours, and at the place of no other node, so that readers can be compared
        position[node] = (position[reader.prev] + position[reader]) / 2
        reader.prepend(node)
    return facts


def _widens(facts: Facts, node: Node) -> bool:
    """True if the operands have fewer bytes a row than the result.

    Ops that keep the width go along if no gradient passes through them. Others stay where the model has them:
    sums of gradients are taken in that order.
    """
    if facts.kinds.get(node) is not Kind.STREAM or node in facts.refusals:
        return False
    sources = [n for n in operands(node) if facts.kinds[n] is Kind.STREAM]
    before, width = sum(row_bytes(facts, n) for n in sources), row_bytes(facts, node)
    if not sources or not math.isfinite(width):
        return False
    along = node not in facts.needs_grad and all(len(n.users) == 1 for n in sources)
    return before < width or (before == width and along)
