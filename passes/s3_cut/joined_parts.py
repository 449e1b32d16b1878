"""joined_parts: parts side by side that run unchunked become one, where that holds less.

NOTE [parts side by side]: behind an op that is not understood, nothing is known of the rows of what is made
of its result, so that each op that follows may become a segment that runs unchunked. Each one stores what
lies before it until the backward; what it holds itself while it is computed again, the step holds of one
segment at a time. So a border between two of them pays where what lies at all such borders is more than
what the largest segment grows by without them. A layer is then one segment, as with checkpointing, and
layers stay apart.

A part that runs in chunks joins the one behind it where it makes wide values of the narrow ones of a
layer's border, as a projection does whose results an op reads that is not understood: the wide ones would
be stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import sympy
from torch.fx import Node

from ..graph.facts import Facts, Segment, expression, tensors_of
from ..graph.symbols import in_numbers
from ..s2_prove.inner_outputs import shown
from ..s2_prove.scores import is_view
from .alive_bytes import alive_costs, lifetimes, own_costs

# Bytes are compared at this many tokens, whatever the length at which the graph was captured.
TOKENS = 4096
# Limits on a segment that are tried: each so many times the one before.
GROWTH = 1.25
# What lies behind a part has to have so many times the bytes of what lies before it, if it runs in chunks.
WIDER = 1.5


def joined_parts(facts: Facts, order: list[Node], pieces: Sequence[Segment]) -> list[list[Node]]:
    """The nodes of each segment, where some of those side by side are made one.

    Args:
        facts: of the graph.
        order: all streamed nodes, in graph order.
        pieces: segments that they can be cut into.
    """
    parts, lives = [p.nodes for p in pieces], list(lifetimes(facts, order))
    borders = list(itertools.accumulate((len(part) for part in parts), initial=0))
    alive = alive_costs(lives, len(order))
    may_go = _may_go(facts, pieces, [alive[border] for border in borders])
    if not any(may_go):
        return parts
    made = [_made(facts, part) for part in parts]
    own = own_costs(lives, borders[1:-1])  # what lies at a border and at no other one
    stored = [TOKENS * own[border] for border in borders[1:-1]]
    # what a part holds that stays alone: a chunk, which is nothing beside the whole, or all of it
    alone = [size if piece.refused else 0 for size, piece in zip(made, pieces, strict=True)]
    best, least = list(range(1, len(parts) + 1)), sum(stored) + max(alone)
    limit = max(1.0, *alone)
    while True:
        ends, between = _ends(made, stored, may_go, limit)
        groups = itertools.pairwise([0, *ends])
        largest = max(sum(made[a:b]) if b - a > 1 else alone[a] for a, b in groups)
        if between + largest < least:
            best, least = ends, between + largest
        if limit >= sum(made):
            break
        limit *= GROWTH
    groups = itertools.pairwise([0, *best])
    return [list(itertools.chain.from_iterable(parts[start:stop])) for start, stop in groups]


def _may_go(facts: Facts, pieces: Sequence[Segment], alive: list[float]) -> list[bool]:
    """Of each part but the last, whether it may be one with the next; `alive` bytes lie before each."""
    found, returned = [], shown(facts)  # NOTE [gradients of hidden states]: such a value ends its segment
    for place, (piece, behind) in enumerate(itertools.pairwise(pieces)):
        widens = piece.kind != "unchunked" and alive[place + 1] > WIDER * alive[place]
        both = behind.refused is not None and (piece.refused is not None or widens)
        found.append(both and returned.isdisjoint(piece.nodes))
    return found


def _made(facts: Facts, nodes: list[Node]) -> int:
    """Bytes of all that ops make: at most what autograd keeps of them."""
    return sum(_bytes(facts, n) for n in nodes if not is_view(n))


def _bytes(facts: Facts, node: Node) -> int:
    known = {**facts.values, facts.sequence: TOKENS}
    sizes = ((t, sympy.Mul(*map(expression, t.shape))) for t in tensors_of(node))
    return sum(in_numbers(size, known, unknown=2) * t.element_size() for t, size in sizes)


def _ends(
    made: list[int], stored: list[float], may_go: Sequence[bool], limit: float
) -> tuple[list[int], float]:
    """Where groups of parts end that make at most `limit` bytes, if the least is stored; and how much is."""
    least, begins = [0.0], []  # to store for the parts before each one; where its group begins
    for stop in range(1, len(made) + 1):
        begin, together = stop - 1, made[stop - 1]
        for start in range(stop - 2, -1, -1):
            together += made[start]
            if together > limit or not may_go[start]:
                break
            if least[start] < least[begin]:
                begin = start
        least.append(least[begin] + (stored[stop - 1] if stop < len(made) else 0))
        begins.append(begin)
    ends, stop = [], len(made)
    while stop:
        ends.append(stop)
        stop = begins[stop - 1]
    return ends[::-1], least[-1]
