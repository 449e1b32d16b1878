"""rows_behind: rows that follow ops which nothing is known of are cut off, and run in chunks.

NOTE [rows behind an unchunked part]: where the attention of a layer is not understood, it runs unchunked. But
what follows in the layer, mostly the feed-forward part or the experts, is by rows, and is most of what a
recompute holds. So it becomes a segment of its own. What lies between the two is not stored: they are one
group (`policy.groups`) that keeps the input of the layer. Before the backward of the rows the part is run
again, this time recorded by autograd, which differentiates it afterwards: nothing runs more often than with
checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..graph.facts import Facts, Segment
from .alive_bytes import alive_costs, lifetimes

# What lies at the cut may have so many times the bytes of what lies at the borders of the segment.
WIDER = 2.0


def rows_behind(facts: Facts, order: Sequence[Node], piece: Segment, stops: Sequence[int]) -> int | None:
    """How many nodes of a segment that runs unchunked come before its rows; None if it is not cut.

    Args:
        order: all streamed nodes, in graph order; those of the segment lie side by side among them.
        stops: positions in `order` of the nodes that may be no part of rows.
    """
    start = order.index(piece.nodes[0])
    end = start + len(piece.nodes)
    inside = [k for k in stops if start <= k < end]
    if not inside:
        return None
    costs = alive_costs(list(lifetimes(facts, list(order))), len(order))
    least = min(costs[inside[-1] + 1 : end], default=float("inf"))
    if not least <= WIDER * max(costs[start], costs[end] if end < len(costs) else 0.0):
        return None
    return next(k for k in range(inside[-1] + 1, end) if costs[k] == least) - start
