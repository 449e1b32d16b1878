"""Columns of other devices, which come block by block while a chunk runs, see NOTE [columns in blocks].

NOTE [who sends when]: each device runs its chunks in order, and all have as many. So the chunks of one turn
are all in the first half of the sequence, or all in the second one (NOTE [whose rows]). Before the chunk of
some device lie pieces of the first half, and in the second half those of it that later devices have, too. So
in a turn of the first half all devices send the rows of their first piece, a block of each at a time; in one
of the second half those of both. Who has no use for a block lets it pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...passes.graph.facts import sum_dtype
from ...passes.s4_trace.attention_kernels import AttentionBlock, Kernel, choose
from ...passes.s4_trace.columns_of_others import within
from ...passes.s4_trace.prefix_attention import differentiated, read
from .own_rows import OwnRows, all_gather, reduce_scatter


@dataclass(frozen=True)
class ColumnBlock:
    """Rows that all devices send at once: of the same piece of each, from the same place on.

    Attributes:
        piece: 0 or 1, which of a device's pieces.
        first: place of the first row among those of the piece.
        rows: of each device, as many as the one with the longest piece has.
    """

    piece: int
    first: int
    rows: int


class ColumnBlocks:
    """The exchange of columns while the chunks of a segment run.

    Args:
        own: whose rows are whose; each device has some in each of its two pieces.
        chunk: rows of a chunk: so many columns come at a time.
    """

    def __init__(self, own: OwnRows, chunk: int) -> None:
        self.own, self.rows = own, rows_of_block(own.devices, chunk)
        self.piece = 0

    def turn(self, start: int) -> AbstractContextManager[None]:
        """Within: the chunk that begins with this row is run, while other devices run one of theirs."""
        self.piece = 0 if start < self.own.piece(self.own.rank, self.own.tokens)[1] else 1
        return within(self)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, c, D) and log-sum-exp (B, H, c) over all columns, see `Exchange`."""
        kernel, merged = _kernel(query, key, value), out.to(lse.dtype, copy=True)
        for block in blocks_of(self.own.longest_piece, self.piece, self.rows):
            gathered = self._gather(block, key, value)
            keys, values = self._before(block, gathered)
            if not keys.shape[2]:
                continue
            own, sums = read(kernel, AttentionBlock(query, keys, values, scale=scale))
            both = torch.logaddexp(lse, sums)
            weight, weight_before = ((x - both).exp().unsqueeze(-1) for x in (sums, lse))
            merged, lse = merged.mul_(weight_before).add_(own * weight), both
        return torch.empty_like(query).copy_(merged), lse

    def differentiate(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_gradient: Tensor,
        value_gradient: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Tensor:
        """The gradient of the query, (B, H, c, D), that comes through columns of others, see `Exchange`."""
        kernel, total = _kernel(query, key, value), torch.zeros_like(query)
        for block in blocks_of(self.own.longest_piece, self.piece, self.rows):
            gathered = self._gather(block, key, value)
            keys, values = self._before(block, gathered)
            sent = torch.zeros_like(gathered, dtype=sum_dtype(gathered.dtype))
            if keys.shape[2]:
                read_here = AttentionBlock(query, keys, values, scale=scale)
                dq, *found = differentiated(kernel, gradient, read_here, out, lse)
                total.add_(dq)
                self._place(block, sent, *found)
            got = torch.empty_like(sent[0])
            reduce_scatter(got, sent.flatten(0, 1), self.own.group)
            place, rows = self._held(block)
            for own, part in zip((key_gradient, value_gradient), got, strict=True):
                self._all(own).narrow(2, place, rows).add_(part.narrow(2, 0, rows))
        return total

    # ---- blocks

    def _held(self, block: ColumnBlock, rank: int | None = None) -> tuple[int, int]:
        """Of a block, where the rows of a device begin among those that it holds, and how many they are."""
        rank = self.own.rank if rank is None else rank
        spans = [self.own.piece(k, self.own.tokens) for k in self.own.pieces_of(rank)]
        start, stop = spans[block.piece]
        before = spans[0][1] - spans[0][0] if block.piece else 0
        return before + block.first, max(0, min(block.rows, stop - start - block.first))

    def _reads(self, block: ColumnBlock) -> Iterator[tuple[int, int]]:
        """The devices of which this one's chunk reads the rows of a block, and how many they are."""
        mine = self.own.pieces_of(self.own.rank)[self.piece]
        for rank in range(self.own.devices):
            if rank != self.own.rank and self.own.pieces_of(rank)[block.piece] < mine:
                yield rank, self._held(block, rank)[1]

    def _all(self, view: Tensor) -> Tensor:
        """All columns that this device holds: of these the tensor is a view of the first ones."""
        shape = (*view.shape[:2], self.own.count(self.own.tokens), view.shape[3])
        return view.as_strided(shape, view.stride())

    def _gather(self, block: ColumnBlock, key: Tensor, value: Tensor) -> Tensor:
        """Keys and values that all devices send, (devices, 2, B, H, n, D)."""
        place, rows = self._held(block)
        sent = key.new_zeros((2, *key.shape[:2], block.rows, key.shape[3]))
        for own, part in zip((key, value), sent, strict=True):
            part.narrow(2, 0, rows).copy_(self._all(own).narrow(2, place, rows))
        got = sent.new_empty((self.own.devices, *sent.shape))
        all_gather(got.flatten(0, 1), sent, self.own.group)
        return got

    def _before(self, block: ColumnBlock, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Those of them that the chunk reads: keys and values, (B, H, n, D)."""
        parts = [gathered[rank].narrow(3, 0, rows) for rank, rows in self._reads(block)]
        found = torch.cat(parts, 3) if parts else gathered[0].narrow(3, 0, 0)
        return found[0], found[1]

    def _place(self, block: ColumnBlock, sent: Tensor, *gradients: Tensor) -> None:
        """Write gradients of what `_before` gives where they are sent from, (devices, 2, B, H, n, D)."""
        first = 0
        for rank, rows in self._reads(block):
            for part, own in zip(sent[rank], gradients, strict=True):
                part.narrow(2, 0, rows).copy_(own.narrow(2, first, rows))
            first += rows


def can_take_turns(tokens: int, devices: int, chunk: int) -> bool:
    """True if each device has a row for each chunk of the longest piece, in both of its pieces."""
    shortest, longest = tokens // (2 * devices), -(-tokens // (2 * devices))
    return shortest >= -(-longest // chunk)


def sent_by_blocks(tokens: Any, devices: int, chunk: Any) -> tuple[Any, Any]:
    """Columns that are gathered while the chunks of a segment run once, and in how many calls.

    A device has two pieces, and in each of them r = T / (2 n chunk) chunks. With those of its first piece
    half of the columns are gathered, with those of the second one all: 3/2 r T columns in all.

    Args:
        tokens, chunk: numbers, or symbols for lengths that are divided evenly.
    """
    if not isinstance(tokens, int):
        piece = tokens / (2 * devices)
        turns = piece / chunk
        return 3 * turns * piece * devices, 3 * turns * piece * devices / chunk
    piece, rows = -(-tokens // (2 * devices)), rows_of_block(devices, chunk)
    turns = -(-piece // chunk)
    return 3 * turns * piece * devices, 3 * turns * -(-piece // rows)


def rows_of_block(devices: int, chunk: int) -> int:
    """Rows of each device in a block of as many columns as a chunk has rows."""
    return -(-chunk // devices)


def blocks_of(longest: int, piece: int, rows: int) -> Iterator[ColumnBlock]:
    """What is sent while a chunk of this piece runs, in order.

    Args:
        longest: rows of the longest piece.
        rows: of a device in a block.
    """
    for sent in range(piece + 1):
        for first in range(0, longest, rows):
            yield ColumnBlock(sent, first, min(rows, longest - first))


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> Kernel:
    kernel = choose(query, key, value, None)
    assert kernel is not None
    return kernel
