"""Rows of a sequence that lies on several devices: which are this device's, and how they are exchanged.

NOTE [whose rows]: each device is given the whole sequence, and holds hidden states of its own rows only.
With a causal mask the last rows read the most, so the sequence is cut in twice as many pieces as there are
devices, and each has one of the first half and its mirror image. Where one device must wait for another
(recurrences) each has one piece, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor

from ...passes.graph.facts import Axis
from ...passes.s4_trace.program_inputs import Extent
from ...versions.differences import collective

Size = Callable[[sympy.Expr], int]
Span = tuple[int, int]

# Set within a call that is no step of the model: it runs on one device.
_alone: ContextVar[bool] = ContextVar("streambp_alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within: what runs is not shared with other devices."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def is_alone() -> bool:
    """True within `alone`."""
    return _alone.get()


def all_gather(into: Tensor, value: Tensor, group: Any) -> None:
    """PyTorch's all-gather of tensors of the same shape and dtype, along dim 0."""
    collective("all_gather")(into, value, group=group)


def reduce_scatter(into: Tensor, value: Tensor, group: Any) -> None:
    """PyTorch's reduce-scatter of tensors of the same shape and dtype, along dim 0; a sum."""
    collective("reduce_scatter")(into, value, group=group)


@dataclass(frozen=True)
class OwnRows:
    """Which rows of a sequence are whose.

    Attributes:
        group: the processes that share it.
        tokens: of the whole sequence.
        in_turn: each device has one piece, see NOTE [whose rows].
    """

    group: Any
    tokens: int
    in_turn: bool

    @cached_property
    def rank(self) -> int:
        """The index of this device among those of the group, from 0."""
        return dist.get_rank(self.group)

    @cached_property
    def devices(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def spans(self, total: int, rank: int | None = None) -> list[Span]:
        """First row and end of each of a device's pieces, as far as there are rows.

        Args:
            total: rows of the value; fewer than tokens where a slice took the last ones off.
            rank: of the device; None: this one.
        """
        own = (self.piece(p, total) for p in self.pieces_of(self.rank if rank is None else rank))
        return [(start, stop) for start, stop in own if start < stop]

    @property
    def pieces(self) -> int:
        """Into how many pieces the sequence is cut."""
        return self.devices if self.in_turn else 2 * self.devices

    def pieces_of(self, rank: int) -> tuple[int, ...]:
        """The indices of a device's pieces among all, in order."""
        return (rank,) if self.in_turn else (rank, self.pieces - 1 - rank)

    def piece(self, index: int, total: int) -> Span:
        """First row and end of a piece of so many rows; there may be none."""
        start, stop = (self.tokens * k // self.pieces for k in (index, index + 1))
        return min(start, total), min(stop, total)

    def chunks_of_piece(self, chunk: int) -> int:
        """Into how many chunks each piece is cut: as many as the longest one needs."""
        return -(-self.longest_piece // chunk)

    @property
    def longest_piece(self) -> int:
        """Rows of the longest piece; others have one fewer."""
        return -(-self.tokens // self.pieces)

    def count(self, total: int, rank: int | None = None) -> int:
        """How many of so many rows a device has."""
        return sum(stop - start for start, stop in self.spans(total, rank))

    def place(self, row: int) -> int:
        """The index of one of this device's rows among them."""
        before = 0
        for start, stop in self.spans(self.tokens):
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise AssertionError(f"row {row} is not on device {self.rank}")

    def of_others(self, extent: Extent) -> Extent:
        """The same rows of this device, whose columns are those that it holds before them."""
        place = self.place(extent.start)
        low = extent.start - place
        return Extent(extent.rows, place, low, extent.total, of_others=True)

    def begin_of(self, rank: int) -> int:
        """In turn: the first row of a device."""
        return self.tokens * rank // self.devices

    @property
    def begin(self) -> int:
        """In turn: the first row of this device."""
        return self.begin_of(self.rank)

    # ---- one value: rows in front

    def own(self, rows: Tensor) -> Tensor:
        """This device's rows of a tensor of shape (total, ...), as a copy."""
        pieces = [rows[start:stop] for start, stop in self.spans(len(rows))]
        return torch.cat(pieces) if pieces else rows[:0].clone()

    def gather(self, own: Tensor, total: int) -> Tensor:
        """All rows, (total, ...), of each device's own, which have the same dtype."""
        full = own.new_empty((total, *own.shape[1:]))
        self.fill(full, own)
        return full

    def fill(self, full: Tensor, own: Tensor) -> None:
        """Write all devices' rows into a tensor of shape (total, ...): this one's are given, (count, ...)."""
        most = max(self.count(len(full), k) for k in range(self.devices))
        sent = own.new_zeros((most, *own.shape[1:]))
        sent[: len(own)] = own
        got = own.new_empty((self.devices * most, *own.shape[1:]))
        all_gather(as_numbers(got), as_numbers(sent), self.group)
        got = got.unflatten(0, (self.devices, most))
        for k in range(self.devices):
            place = 0
            for start, stop in self.spans(len(full), k):
                full[start:stop] = got[k, place : place + stop - start]
                place += stop - start

    def sum(self, full: Tensor) -> Tensor:
        """This device's rows of the sum over all devices of tensors of shape (total, ...)."""
        counts = [self.count(len(full), k) for k in range(self.devices)]
        sent = full.new_zeros((self.devices, max(counts), *full.shape[1:]))
        for k, count in enumerate(counts):
            if count:
                sent[k, :count] = torch.cat([full[a:b] for a, b in self.spans(len(full), k)])
        got = full.new_empty(sent.shape[1:])
        reduce_scatter(as_numbers(got), as_numbers(sent.flatten(0, 1)), self.group)
        return got[: counts[self.rank]]

    def write(self, full: Tensor, own: Tensor) -> None:
        """Write this device's rows, (count, ...), into a tensor of shape (total, ...)."""
        place = 0
        for start, stop in self.spans(len(full)):
            full[start:stop] = own[place : place + stop - start]
            place += stop - start

    def zero(self, full: Tensor) -> None:
        """This device's rows of a tensor of shape (total, ...) become zero."""
        for start, stop in self.spans(len(full)):
            full[start:stop].zero_()

    def send(self, value: Tensor, rank: int) -> None:
        """Send a tensor of any shape and dtype to the device of this rank."""
        if value.numel():
            numbers = as_numbers(value.contiguous())
            dist.send(numbers, dist.get_global_rank(self.group, rank), group=self.group)

    def receive(self, into: Tensor, rank: int) -> None:
        """Receive a tensor of the same shape and dtype from the device of this rank."""
        if into.numel():
            got = torch.empty_like(into, memory_format=torch.contiguous_format)
            dist.recv(as_numbers(got), dist.get_global_rank(self.group, rank), group=self.group)
            into.copy_(got)


def as_numbers(value: Tensor) -> Tensor:
    """The same memory in a dtype that is exchanged: truth values as bytes, complex numbers as pairs.

    Complex numbers have a dim more, of size 2.
    """
    if value.dtype == torch.bool:
        return value.view(torch.uint8)
    return torch.view_as_real(value) if value.is_complex() else value


@dataclass(frozen=True)
class RowsOfValue:
    """How the rows of a value lie in its tensor, on this device and as a whole.

    Attributes:
        own: whose they are.
        total: rows of the whole value.
        dim: that holds them, merged with `outer` entries before and `inner` ones within each.
    """

    own: OwnRows
    total: int
    dim: int
    outer: int
    inner: int

    @staticmethod
    def of(own: OwnRows, dim: int, axis: Axis, resolve: Size) -> RowsOfValue:
        """Of a value whose dim carries the sequence along this axis."""
        return RowsOfValue(own, own.tokens - axis.removed, dim, resolve(axis.outer), resolve(axis.inner))

    @property
    def count(self) -> int:
        """How many rows are on this device."""
        return self.own.count(self.total)

    @property
    def entries(self) -> int:
        """Size of the dim on this device."""
        return self.outer * self.count * self.inner

    def _split(self, value: Tensor, rows: int) -> Tensor:
        """Rows in front, as a view."""
        return value.unflatten(self.dim, (self.outer, rows, self.inner)).movedim(self.dim + 1, 0)

    def _joined(self, rows: Tensor) -> Tensor:
        return rows.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2).contiguous()

    def slice(self, full: Tensor) -> Tensor:
        """This device's rows of the whole value, whose dim has outer x total x inner entries."""
        return self._joined(self.own.own(self._split(full, self.total)))

    def gather(self, own: Tensor) -> Tensor:
        """The whole value, whose dim has outer x total x inner entries, of each device's rows of it."""
        return self._joined(self.own.gather(self._split(own, self.count).contiguous(), self.total))

    def sum(self, full: Tensor) -> Tensor:
        """This device's rows of the sum over all devices of values of the whole shape."""
        return self._joined(self.own.sum(self._split(full, self.total)))

    def spread(self, own: Tensor) -> Tensor:
        """This device's rows among zeros, in the whole shape."""
        shape = list(own.shape)
        shape[self.dim] = self.outer * self.total * self.inner
        full = own.new_zeros(shape)
        self.own.write(self._split(full, self.total), self._split(own, self.count))
        return full
