"""saving: which values are saved for the backward of which rows, besides what a segment reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Price:
    """What a byte costs that the forward of a chunk saves for its backward, see `s5_lower.saved_values`.

    Attributes:
        operations: that a saved byte must spare the backward, at the least. Elementwise work counts as well.
        prefix: rows before the chunk for which operations are counted. None: what counts is what grows faster
            than the sequence, and that without a limit. So the results of attention are saved, and nothing
            else is.
    """

    operations: float
    prefix: int | None = None

    def __str__(self) -> str:
        if self.prefix is None:
            return "attention results"
        return f"what spares {self.operations:,.0f} operations a byte"


#: The results of attention are saved.
ATTENTION = Price(1)


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of the sequence of which the same is saved.

    Attributes:
        stop: as a share of all rows, where the piece ends; it begins where the one before it does. The last
            one ends at 1. A chunk belongs to the piece in which its first row lies.
        price: what is saved; None: nothing.
    """

    stop: Fraction
    price: Price | None


#: All rows.
ALL = (Fraction(0), Fraction(1))
Share = tuple[Fraction, Fraction]


@dataclass(frozen=True)
class Saving:
    """What each segment saves for its backward, besides its inputs.

    Attributes:
        segments: by index of the segment, the pieces of its rows in order; without any nothing is saved.
        words: what that is, for people.
    """

    segments: tuple[tuple[Piece, ...], ...]
    words: str = field(default="inputs and chosen values", compare=False)

    def __str__(self) -> str:
        return self.words


def evenly(prices: Sequence[Price | None]) -> tuple[Piece, ...]:
    """Pieces of the same size, one for each price."""
    return tuple(Piece(Fraction(k, len(prices)), price) for k, price in enumerate(prices, 1))


def everywhere(price: Price | None) -> tuple[Piece, ...]:
    """The same is saved of all rows."""
    return () if price is None else (Piece(Fraction(1), price),)


def shares(pieces: Sequence[Piece]) -> Iterator[tuple[Share, Price | None]]:
    """Where each piece begins and ends, and what is saved of it."""
    begin = Fraction(0)
    for piece in pieces or (Piece(Fraction(1), None),):
        yield (begin, piece.stop), piece.price
        begin = piece.stop


def is_within(row: int, total: int, share: Share) -> bool:
    """True if a row of so many lies in a share of them."""
    return share[0] * total <= row < share[1] * total
