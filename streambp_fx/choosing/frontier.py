"""How much work a chunk's backward has left for how many bytes that are saved of the chunk.

Each price of a byte has its minimum cut (`passes.s5_lower.saved_values`). All of them together are the lower
convex hull of the points (bytes saved, operations left) of all sets of values: the frontier. Its corners are
found by asking, for two known ones, at which price both are equally good, and whether another one is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch.fx import Node

from ..passes.cost.program import tensor_bytes
from ..passes.s5_lower.saved_values import (
    ForwardHalf,
    computed_again,
    operations_of,
    operations_per_byte,
    saved_values,
)
from ..passes.step.saving import Price

# At a lower price elementwise work is saved, which takes memory to be written and read as well.
LEAST = 2
# A corner counts if it spares at least this share of all the work.
SHARE = 0.02
# As many corners are chosen from, besides the one where nothing is saved: each is a set of programs.
CORNERS = 4


@dataclass(frozen=True)
class Corner:
    """A set of values that may be saved.

    Attributes:
        price: at which it is; None: nothing is saved.
        saved: bytes, for a typical chunk.
        left: operations that the backward computes again, for that chunk.
    """

    price: Price | None
    saved: int
    left: int


def frontier(half: ForwardHalf, prefix: int) -> list[Corner]:
    """The corners of the frontier, from the one where nothing is saved to the one where most is.

    Args:
        half: of a joint program.
        prefix: rows before the chunk for which operations are counted.
    """
    if not half.nodes:
        return [Corner(None, 0, 0)]
    least = LEAST * operations_per_byte(half.nodes[0])
    nothing = _corner(half, None, prefix)
    most = _corner(half, Price(least, prefix), prefix)
    if most.saved == 0:
        return [nothing]
    found = [nothing, *_between(half, nothing, most, prefix, SHARE * nothing.left), most]
    return _worthwhile(found)


def _between(half: ForwardHalf, less: Corner, more: Corner, prefix: int, least: float) -> list[Corner]:
    """Corners between two that are at least so many operations apart."""
    if more.saved <= less.saved or less.left - more.left < least:
        return []
    price = Price((less.left - more.left) / (more.saved - less.saved), prefix)
    found = _corner(half, price, prefix)
    worth = lambda corner: corner.left + price.operations * corner.saved  # noqa: E731
    if not less.saved < found.saved < more.saved or worth(found) >= worth(less) * (1 - 1e-9):
        return []
    ends = (less, found), (found, more)
    before, after = (_between(half, *pair, prefix, least) for pair in ends)
    return [*before, found, *after]


def _corner(half: ForwardHalf, price: Price | None, prefix: int) -> Corner:
    saved = [] if price is None else saved_values(half, price)
    again = half.operations(prefix)
    left = sum(again[n] for n in computed_again(half, saved))
    return Corner(price, sum(half.bytes[n] for n in saved), left)


def _worthwhile(corners: Sequence[Corner]) -> list[Corner]:
    """The first, the last, and those between that lie farthest below the line from neighbour to neighbour."""
    found = list(corners)
    while len(found) > CORNERS + 1:
        losses = [_below(*found[k - 1 : k + 2]) for k in range(1, len(found) - 1)]
        del found[1 + losses.index(min(losses))]
    return found


def _below(before: Corner, own: Corner, after: Corner) -> float:
    """How many operations a corner spares against a mixture of its neighbours that saves as much."""
    share = (own.saved - before.saved) / (after.saved - before.saved)
    return before.left + share * (after.left - before.left) - own.left


def expressions(half: ForwardHalf, saved: Sequence[Node]) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes of what is saved, and operations of what is computed again, in the size symbols of a trace."""
    bytes_saved = sum((tensor_bytes(n.meta["val"]) for n in saved), sympy.S.Zero)
    return bytes_saved, sum((operations_of(n) for n in computed_again(half, saved)), sympy.S.Zero)
