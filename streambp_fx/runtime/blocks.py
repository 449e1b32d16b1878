"""Blocks of samples and rows, and which of them a step runs.

NOTE [samples that have ended]
In a padded batch most rows of a short sample are padding. Where the loss is linear in its rows its
coefficients are known before the step (`head`), and a row after the last one of its sample that has a
coefficient has no part in the loss: attention is causal, and samples do not see each other
(`passes.batch`). So a chunk is run for the samples that go on, in pieces that lie together in the batch. What
is not run is zero in the values between segments; its gradient is zero and is not computed. It is decided by
the loss alone, not by a mask: padding on the left comes before rows that count, and is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..passes.batch import Place
from ..passes.inputs import Extent
from .common import OwnedBuffers


@dataclass(frozen=True)
class Part:
    """Samples [first, first + count) of the batch."""

    first: int
    count: int


@dataclass(frozen=True)
class Block:
    """A chunk of rows, of some samples or (None) of all."""

    extent: Extent
    part: Part | None = None

    def own(self) -> Block:
        """The same rows with columns of their own only."""
        return Block(self.extent.own(), self.part)


def runs(wanted: Sequence[bool], value: bool = True) -> Iterator[Part]:
    """The longest runs of samples for which `wanted` has this value."""
    first = None
    for k, own in enumerate((*wanted, not value)):
        if own == value and first is None:
            first = k
        elif own != value and first is not None:
            yield Part(first, k - first)
            first = None


@dataclass
class Step:
    """What one call of the model fixes for all its segments.

    Attributes:
        needed: for each sample, how many of its rows have a part in the loss, or come before one that has;
            None if all are run. See NOTE [samples that have ended].
        batch: the symbol of the batch size, if it is one.
    """

    sizes: dict[sympy.Symbol, int]
    total: int
    plain: frozenset[Node]
    full: frozenset[Node]
    seed: int
    owned: OwnedBuffers
    chunk: int  # rows of a chunk where there is attention or the like
    loss_chunk: int  # rows of a chunk elsewhere
    training: bool = True
    needed: tuple[int, ...] | None = None
    batch: sympy.Symbol | None = None

    def parts(self, start: int) -> list[Part | None]:
        """The samples that a chunk is run for, in pieces that lie together; None for all of them."""
        if self.needed is None or all(n > start for n in self.needed):
            return [None]
        return list(runs([n > start for n in self.needed]))

    def of(self, part: Part | None) -> Step:
        """The step for a part of the samples."""
        if part is None:
            return self
        assert self.batch is not None
        return dataclasses.replace(self, sizes={**self.sizes, self.batch: part.count}, needed=None)

    def resolve(self, size: sympy.Expr) -> int:
        """A size as a number."""
        return int(size) if size.is_Integer else int(size.subs(self.sizes))


def counted(
    coefficients: Tensor,
    dim: int,
    inner: int,
    samples: tuple[Place, int] | None,
    extents: Sequence[Extent],
) -> list[list[bool]]:
    """For each chunk and each sample whether a row of it has a part in the loss: has a coefficient.

    Args:
        coefficients: of the rows of the loss, in their own shape.
        dim: that of the rows, `inner` entries each.
        samples: where the samples are in it, and the entries of one; None: all are taken for one.
        extents: the chunks.
    """
    if not extents:
        return []
    total = extents[0].total
    starts = torch.tensor([e.start for e in extents], device=coefficients.device)
    positions = torch.arange(coefficients.shape[dim], device=coefficients.device) // inner % total
    chunks = torch.bucketize(positions, starts, right=True) - 1
    keys = _along(chunks, dim, coefficients)
    batch = 1
    if samples is not None:
        place, each = samples
        batch = coefficients.shape[place.dim] // each
        own = torch.arange(coefficients.shape[place.dim], device=coefficients.device) // each
        keys = keys + _along(own, place.dim, coefficients) * len(extents)
    flags = torch.zeros(batch * len(extents), device=coefficients.device)
    counts = (coefficients != 0).float().flatten()
    flags.scatter_reduce_(0, keys.expand(coefficients.shape).flatten(), counts, "amax")
    return (flags.view(batch, len(extents)).t() > 0).tolist()


def needed(
    flags: Sequence[Sequence[bool]], extents: Sequence[Extent], removed: int
) -> tuple[int, ...] | None:
    """For each sample how many of its rows the loss reads; None if it reads all.

    Args:
        flags: for each chunk of the loss head and each sample whether it has a part in the loss.
        extents: those chunks.
        removed: rows that the head has less than the sequence, at either end.
    """
    if not extents:
        return None
    ends = [0] * len(flags[0])
    for extent, own in zip(extents, flags, strict=True):
        stop = extent.start + extent.rows + removed
        ends = [stop if flag else end for flag, end in zip(own, ends, strict=True)]
    return None if all(end >= extents[-1].total for end in ends) else tuple(ends)


def _along(values: Tensor, dim: int, like: Tensor) -> Tensor:
    return values.view([-1 if d == dim else 1 for d in range(like.dim())])
