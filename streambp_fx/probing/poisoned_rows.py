"""Rows of a tensor replaced by something else and put back, and the first row in which two tensors differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Finite poison, in units of the root mean square of what it replaces: small beside the range of any dtype,
# and large enough that a weight of 1e-3 on it is seen in every precision.
SCALE = 8.0


class Poison(Enum):
    """What rows of floating point numbers are replaced with; integers always with those of other rows.

    NAN: seen wherever it is read, since nothing absorbs it. NUMBERS: random ones, several times as large.
    OTHER_ROWS: the values of the next row, which an op that checks its values (probabilities) takes as well.
    """

    NAN = "nan"
    NUMBERS = "numbers"
    OTHER_ROWS = "other rows"


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor are: dim `dim` has the size `outer * length * inner`."""

    dim: int
    outer: int
    length: int
    inner: int

    @property
    def merged(self) -> bool:
        """True if the dim holds more than the rows."""
        return self.outer != 1 or self.inner != 1

    @property
    def own_dim(self) -> int:
        """The dim of the rows in what `split` gives."""
        return self.dim + 1 if self.merged else self.dim

    def split(self, value: Tensor) -> Tensor:
        """A view of the tensor in which a dim holds the rows and nothing else."""
        return value.unflatten(self.dim, (self.outer, self.length, self.inner)) if self.merged else value

    def of(self, value: Tensor, low: int, high: int) -> Tensor:
        """A view of rows [low, high), of the same dtype, with as many entries in dim `own_dim`."""
        return self.split(value).narrow(self.own_dim, low, high - low)


class Operand:
    """A copy of an operand in which rows can be poisoned.

    Attributes:
        buffer: the copy.
        faithful: it lies in memory as the original does, so that the same kernel runs on it.
    """

    def __init__(self, clean: Tensor, rows: Rows, seed: int) -> None:
        self.clean, self.rows, self.seed = clean, rows, seed
        self.buffer = clean.clone()
        self.faithful = self.buffer.stride() == clean.stride() and clean.storage_offset() == 0
        self._made: dict[Poison, Tensor] = {}

    def poison(self, low: int, high: int, kind: Poison) -> None:
        """Replace rows [low, high)."""
        target = self.rows.of(self.buffer, low, min(high, self.rows.length))
        if self.clean.dtype.is_floating_point and kind is Poison.NAN:
            target.fill_(float("nan"))
            return
        if kind not in self._made:
            self._made[kind] = self._values(kind)
        target.copy_(self.rows.of(self._made[kind], low, min(high, self.rows.length)))

    def restore(self, low: int, high: int) -> None:
        """Put back the values of rows [low, high)."""
        high = min(high, self.rows.length)
        self.rows.of(self.buffer, low, high).copy_(self.rows.of(self.clean, low, high))

    def _values(self, kind: Poison) -> Tensor:
        clean, rows = self.clean, self.rows
        generator = torch.Generator(clean.device).manual_seed(self.seed)
        if clean.dtype == torch.bool:
            return clean.logical_not()
        if kind is Poison.OTHER_ROWS:
            return rows.split(clean).roll(-1, rows.own_dim).reshape(clean.shape)
        if not clean.dtype.is_floating_point:
            order = torch.randperm(rows.length, generator=generator, device=clean.device)
            return rows.split(clean).index_select(rows.own_dim, order).reshape(clean.shape)
        noise = torch.randn(clean.shape, generator=generator, device=clean.device, dtype=torch.float32)
        finite = clean.float().nan_to_num(0.0, 0.0, 0.0)
        size = float(finite.square().mean().sqrt()) or 1.0
        return noise.mul_(SCALE * size).to(clean.dtype)


def first_difference(expected: Any, found: Any, rows: Rows, low: int, high: int) -> str | None:
    """The first of rows [low, high) that differs, as "7 changed" or "7 became NaN"; None if all are equal.

    Equal means bit for bit, but that 0 equals -0: the zero weights of masked columns may add either.
    """
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    for a, b in pairs:
        if not isinstance(a, Tensor) or a.dim() <= rows.dim:
            continue
        a, b = rows.of(a, low, high), rows.of(b, low, high)
        if torch.equal(a, b):
            continue
        differs = (a != b) & ~((a != a) & (b != b))
        places = differs.movedim(rows.own_dim, 0).reshape(high - low, -1).any(1).nonzero()
        if places.numel():
            row = int(places[0])
            new = b.select(rows.own_dim, row)
            nan = bool((new != new).any())
            return f"{low + row} {'became NaN' if nan else 'changed'}"
    return None
