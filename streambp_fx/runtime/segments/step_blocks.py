"""Blocks of samples and rows, and which of them a step runs.

NOTE [samples that have ended]
In a padded batch most rows of a short sample are padding. Where the loss is linear in its rows its
coefficients are known before the step (`loss_head`), and a row after the last one of its sample that has a
coefficient has no part in the loss: attention is causal, and samples do not see each other
(`passes.s2_prove.independent_samples`). So a chunk is run for the samples that go on, in pieces that lie
together in the batch. What is not run is zero in the values between segments; its gradient is zero and is not
computed. It is decided by the loss alone, not by a mask: padding on the left comes before rows that count,
and is run. One row more counts than the loss reads: that of a sample's last token, which has no label, but
logits that somebody may use.

NOTE [masks where it counts]
What rows hold that have no part in the loss makes no difference, as long as it is finite. So a mask that
hides nothing but padding behind the rows that count is plain causal for them, and attention takes no mask: a
chunk's rows of it are as wide as the sequence, and the fastest kernels take none. Only where samples are
independent; and where logits may be read later, only if rows are left out anyway and nothing is random, as
reading them runs the forward again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from ...passes.graph.facts import Mask
from ...passes.s2_prove.independent_samples import Place
from ...passes.s4_trace.program_inputs import Extent
from .own_rows import OwnRows
from .owned_buffers import OwnedBuffers


@dataclass(frozen=True)
class SampleRange:
    """Samples [first, first + count) of the batch."""

    first: int
    count: int


@dataclass(frozen=True)
class RowBlock:
    """A chunk of rows, of some samples or (None) of all."""

    extent: Extent
    part: SampleRange | None = None

    def own(self) -> RowBlock:
        """The same rows with columns of their own only."""
        return RowBlock(self.extent.own(), self.part)


def runs(wanted: Sequence[bool], value: bool = True) -> Iterator[SampleRange]:
    """The longest runs of samples for which `wanted` has this value."""
    first = None
    for k, own in enumerate((*wanted, not value)):
        if own == value and first is None:
            first = k
        elif own != value and first is not None:
            yield SampleRange(first, k - first)
            first = None


@dataclass
class StepData:
    """What one call of the model fixes for all its segments.

    Attributes:
        plain: masks that hide nothing but later rows.
        full: masks under which some row may attend to all columns.
        empty_rows: masks that may leave a row nothing to see.
        needed: for each sample, how many of its rows have a part in the loss, or come before one that has;
            None if all are run. See NOTE [samples that have ended].
        batch: the symbol of the batch size, if it is one.
        limits: for each sample (or for all, as one) the rows that count, not up to the end of a chunk; None
            if those behind them are computed as well, and as eager computes them.
        complete: with `limits`, the step that computes all rows.
        own: the rows that this device runs, of a sequence that lies on several; None: all.
        flags: see NOTE [where flags are 0].
        by_blocks: segments whose chunks read columns of other devices block by block.
    """

    sizes: dict[sympy.Symbol, int]
    total: int
    seed: int
    owned: OwnedBuffers
    chunk: int  # rows of a chunk where there is attention or the like
    loss_chunk: int  # rows of a chunk elsewhere
    training: bool = True
    plain: frozenset[Mask] = frozenset()
    full: frozenset[Mask] = frozenset()
    empty_rows: frozenset[Mask] = frozenset()
    needed: tuple[int, ...] | None = None
    batch: sympy.Symbol | None = None
    limits: list[int] | None = None
    complete: StepData | None = None
    own: OwnRows | None = None
    flags: tuple[tuple[int, ...], ...] = ()
    by_blocks: frozenset[int] = frozenset()

    def parts(self, start: int) -> list[SampleRange | None]:
        """The samples that a chunk is run for, in pieces that lie together; None for all of them."""
        if self.needed is None or all(n > start for n in self.needed):
            return [None]
        return list(runs([n > start for n in self.needed]))

    def of(self, part: SampleRange | None) -> StepData:
        """The step for a part of the samples."""
        if part is None:
            return self
        assert self.batch is not None
        return dataclasses.replace(self, sizes={**self.sizes, self.batch: part.count}, needed=None)

    @property
    def first_index(self) -> int:
        """A number for the first chunk, so that no two chunks draw the same random numbers."""
        return 0 if self.own is None else self.own.rank << 14

    def resolve(self, size: sympy.Expr) -> int:
        """A size as a number."""
        return int(size) if size.is_Integer else int(size.subs(self.sizes))


def counts(
    coefficients: Tensor,
    dim: int,
    inner: int,
    samples: tuple[Place, int] | None,
    extents: Sequence[Extent],
) -> tuple[Tensor, Tensor]:
    """Which rows have a part in the loss: have a coefficient.

    Args:
        coefficients: of the rows of the loss, in their own shape.
        dim: that of the rows, `inner` entries each.
        samples: where the samples are in it, and the entries of one; None: all are taken for one.
        extents: the chunks; at least one.

    Returns:
        int64: for each sample and each chunk, one after the other, 1 if it has such a row, and 0 if not; and
        for each sample how many rows there are up to the last one.
    """
    device, total = coefficients.device, extents[0].total
    starts = torch.tensor([e.start for e in extents], device=device)
    rows = torch.arange(coefficients.shape[dim], device=device) // inner % total
    chunks = _along(torch.bucketize(rows, starts, right=True) - 1, dim, coefficients)
    rows, own, batch = _along(rows, dim, coefficients), torch.zeros_like(chunks), 1
    if samples is not None:
        place, each = samples
        batch = coefficients.shape[place.dim] // each
        own = torch.arange(coefficients.shape[place.dim], device=device) // each
        own = _along(own, place.dim, coefficients)
    has_one = coefficients != 0
    flags = _most(batch * len(extents), own * len(extents) + chunks, has_one.long())
    return flags, _most(batch, own, (rows + 1) * has_one)


def by_chunk(flags: list[int], chunks: int) -> list[list[bool]]:
    """For each of so many chunks and each sample whether it has a row with a coefficient, from `counts`."""
    by_sample = [flags[k : k + chunks] for k in range(0, len(flags), chunks)]
    return [[flag > 0 for flag in own] for own in zip(*by_sample, strict=True)]


def _most(count: int, keys: Tensor, values: Tensor) -> Tensor:
    """The greatest of the values with each key; 0 without any."""
    found = torch.zeros(count, dtype=torch.int64, device=values.device)
    return found.scatter_reduce_(0, keys.expand(values.shape).flatten(), values.flatten(), "amax")


def needed(
    flags: Sequence[Sequence[bool]], limits: Sequence[int], extents: Sequence[Extent], removed: int
) -> tuple[int, ...] | None:
    """For each sample how many of its rows are run; None if all are.

    Those that the chunks of the loss head read, and in any case those that count.

    Args:
        flags: for each chunk of the loss head and each sample whether it has a part in the loss.
        limits: the rows of each sample that count.
        extents: those chunks.
        removed: rows that the head has less than the sequence, at either end.
    """
    ends = list(limits)
    for extent, own in zip(extents, flags, strict=True):
        stop = extent.start + extent.rows + removed
        ends = [max(end, stop) if flag else end for flag, end in zip(own, ends, strict=True)]
    return None if all(end >= extents[-1].total + removed for end in ends) else tuple(ends)


def _along(values: Tensor, dim: int, like: Tensor) -> Tensor:
    return values.view([-1 if d == dim else 1 for d in range(like.dim())])
