"""rows_behind: rows that follow ops which nothing is known of are cut off, and run in chunks.

NOTE [rows behind an unchunked part]: where the attention of a layer is not understood, it runs unchunked. But
what follows in the layer, mostly the feed-forward part or the experts, is by rows, and is most of what a
recompute holds. So it becomes a segment of its own. What lies between the two is not stored: they are one
group (`policy.groups`) that keeps the input of the layer. Before the backward of the rows the part is run
again, this time recorded by autograd, which differentiates it afterwards: nothing runs more often than with
checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from torch.fx import Node

from ..graph.facts import Facts
from .alive_bytes import alive_costs, lifetimes

# What lies at the cut may have so many times the bytes of what lies at the borders of the segment.
WIDER = 2.0


class RowsBehind:
    """Finds where the rows at the end of a segment begin.

    Args:
        facts: of the graph.
        order: all streamed nodes, in graph order.
        is_stop: True for a node that may be no part of them.
    """

    def __init__(self, facts: Facts, order: list[Node], is_stop: Callable[[Node], bool]) -> None:
        self.facts, self.order, self.is_stop = facts, order, is_stop

    @cached_property
    def _places(self) -> dict[Node, int]:
        return {n: k for k, n in enumerate(self.order)}

    @cached_property
    def _costs(self) -> list[float]:
        return alive_costs(lifetimes(self.facts, self.order), len(self.order))

    def begin(self, nodes: Sequence[Node]) -> int | None:
        """How many nodes come before the rows; None if the segment is not cut.

        Args:
            nodes: of a segment that runs unchunked; they lie side by side in the order.
        """
        stops = [k for k, n in enumerate(nodes) if self.is_stop(n)]
        if not stops:
            return None
        start = self._places[nodes[0]]
        costs = self._costs[start : start + len(nodes) + 1]
        places = [k for k in range(stops[-1] + 1, len(nodes)) if math.isfinite(costs[k])]
        cut = min(places, key=costs.__getitem__, default=None)  # the first of those with the fewest bytes
        return None if cut is None or costs[cut] > WIDER * max(costs[0], costs[-1]) else cut
