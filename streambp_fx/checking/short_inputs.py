"""Short inputs of a captured graph, cut from those of a real step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..passes.graph.facts import Facts, expression, shape_of, tensors_of
from ..passes.step.row_chunks import split_rows

# Rows of the short sequence and of a chunk of it: three chunks, the last of them shorter by one. A chunk more
# takes a third more time.
ROWS, CHUNK = 17, 8
# Sequences of the short batch, where the batch size is open.
SAMPLES = 2
# The same, and rows, where some samples are not run to their end: such a one may lie between two that are,
# and there are chunks that are run for all, for some and for none.
SAMPLES_LEFT_OUT, ROWS_LEFT_OUT = 3, 25
# By how much a parameter is varied that is the same number everywhere.
VARIED = 0.05
# Rows behind a window, so that a whole chunk begins where the window does not reach the first row.
BEYOND_WINDOW = CHUNK + 1
# The longest sequence that is tried for a window. Where capture has assumed more rows, longer ones are tried,
# each by so much longer than the one before, up to a share of the step's.
MOST_ROWS, LONGER, MOST_SHARE = 200, 1.25, 0.25


@dataclass(frozen=True)
class ShortSizes:
    """Of a short step.

    Attributes:
        values: of all size symbols.
        rows: of the sequence.
        chunk, loss_chunk: rows of a chunk, of a layer and of the loss head.
        samples: of the batch, None where its size is a number.
    """

    values: Mapping[sympy.Symbol, int]
    rows: int
    chunk: int
    loss_chunk: int
    samples: int | None

    @property
    def pieces(self) -> dict[int, int]:
        """In how many pieces a size is cut that is that of the rows, of one sample or of all."""
        count = -(-self.rows // min(self.chunk, self.loss_chunk))
        return dict.fromkeys((self.rows, self.rows * (self.samples or 1)), count)

    def behind(self, own: int) -> int:
        """How many rows lie behind so many of a chunk in the middle."""
        starts = [start for start, _ in split_rows(self.rows, self.chunk)]
        return max(0, self.rows - starts[len(starts) // 2] - own)

    def another(self, sequence: sympy.Symbol, batch: sympy.Symbol | None) -> ShortSizes:
        """The last chunk less and one sample more, where there are several of them.

        The other chunks have the rows that they had: what is kept by the size of a chunk is used again.
        """
        last = split_rows(self.rows, self.chunk)[-1][0]
        rows = last if last > 1 else max(2, self.rows - 2)
        samples = self.samples + 1 if self.samples is not None and self.samples > 1 else self.samples
        values = {**self.values, sequence: rows}
        if batch is not None and samples is not None:
            values[batch] = samples
        own = [rows if chunk >= self.rows else chunk for chunk in (self.chunk, self.loss_chunk)]
        return ShortSizes(values, rows, own[0], own[1], samples)


def chunk_for(rows: int) -> int:
    """Rows of a chunk such that there are up to four, none of a single row, or more of a few rows each."""
    count = min(4, rows // 2)
    return CHUNK if ROWS <= rows <= MOST_ROWS else -(-rows // max(1, count))


def wanted_rows(facts: Facts) -> int:
    """Rows of the short sequence: more than those of each window, if that is not too many."""
    windows = [int(s.window) for s in facts.segments if s.window is not None]
    return max([ROWS, *(w + BEYOND_WINDOW for w in windows if w + BEYOND_WINDOW <= MOST_ROWS)])


def candidates(
    real: Mapping[sympy.Symbol, int],
    sequence: sympy.Symbol,
    batch: sympy.Symbol | None,
    wanted: int = ROWS,
    chunks: tuple[int, int] = (CHUNK, CHUNK),
    several: int = SAMPLES,
) -> Iterator[ShortSizes]:
    """Sizes to try, the best first.

    Args:
        real: of the step.
        sequence, batch: which of them these are.
        wanted: rows of the short sequence.
        chunks: rows of a chunk of the step, of a layer and of the loss head; the short step has no more.
        several: sequences of the short batch, where the batch size is open.
    """
    total = real[sequence]
    near = [n for n in range(MOST_ROWS + 1) if 2 <= n <= total]
    lengths = sorted(near, key=lambda n: (n < wanted, abs(n - wanted))) or [total]
    beyond = MOST_ROWS * LONGER
    while beyond <= total * MOST_SHARE:
        lengths.append(int(beyond))
        beyond *= LONGER
    samples: list[int | None] = [None]
    if batch is not None:
        samples = list(dict.fromkeys(n for n in (several, SAMPLES, 4, 3, 1, real[batch]) if n <= real[batch]))
    for rows, count in itertools.product(lengths, samples):
        values = {**real, sequence: rows}
        if batch is not None and count is not None:
            values[batch] = count
        own = [min(chunk_for(rows), chunk) for chunk in chunks]
        yield ShortSizes(values, rows, own[0], own[1], count)


class Cut:
    """Cuts the inputs of a captured graph down to other sizes.

    NOTE [which rows]: a window of a real batch may have nothing but prompt or padding in it. So rows come
    from all over the sequence, as many from every stretch in which labels are ignored or not, and in which
    there is padding or not: labels after a prompt stay after it, padding on the left stays there. A square
    mask keeps those rows and columns. Positions count on as they would in a sequence of these rows.

    Args:
        facts: of the graph.
        inputs: of the real step.
        real: its sizes.
        batch: symbol of the batch size, or None.
    """

    def __init__(
        self,
        facts: Facts,
        inputs: Sequence[Any],
        real: Mapping[sympy.Symbol, int],
        batch: sympy.Symbol | None,
    ) -> None:
        self.facts, self.inputs, self.real, self.batch = facts, inputs, real, batch
        self.placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        assert facts.sequence is not None
        self.sequence, self.total = facts.sequence, real[facts.sequence]

    def to(self, sizes: ShortSizes, redraw: bool = False, behind: int | None = None) -> list[Any]:
        """The inputs at these sizes: parameters as aliases that share nothing but memory, the rest as copies.

        Args:
            redraw: nothing is ignored and nothing is padding: what says so is replaced by other values of
                the same input.
            behind: how many of the rows are taken from those behind the last one that counts in some sample;
                None: as many as of any other stretch.
        """
        samples = self._samples(sizes)
        rows = self._rows(sizes.rows, samples, behind)
        return [
            self._cut(n, v, sizes, rows, samples, redraw)
            if isinstance(v, Tensor)
            else self._number(n, v, sizes)
            for n, v in zip(self.placeholders, self.inputs, strict=True)
        ]

    def turned(self, values: Sequence[Any], sizes: ShortSizes) -> list[Any]:
        """The same with the samples in reverse order; parameters as they are.

        Args:
            values: of `to` at these sizes.
        """
        found = []
        for node, given, value in zip(self.placeholders, self.inputs, values, strict=True):
            fixed = not isinstance(value, Tensor) or isinstance(given, torch.nn.Parameter)
            dims = [] if fixed else self._dims_of_samples(node)
            if dims:
                turned = self._laid_out(node, value.detach().flip(dims), sizes)
                value = turned.requires_grad_(value.requires_grad)
            found.append(value)
        return found

    def _dims_of_samples(self, node: Node) -> list[int]:
        """Where the batch size is a number: the first dim of what has rows."""
        shape = shape_of(node)
        if self.batch is not None:
            return [d for d, size in enumerate(shape) if size == self.batch]
        return [0] if self.sequence in shape[1:] else []

    def _number(self, node: Node, value: Any, sizes: ShortSizes) -> Any:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            return int(expression(size).subs(sizes.values))
        return value

    def _cut(
        self, node: Node, value: Tensor, sizes: ShortSizes, rows: Tensor, samples: Tensor, redraw: bool
    ) -> Tensor:
        if isinstance(value, torch.nn.Parameter) or node in self.facts.opaque:
            return value.detach().requires_grad_(value.requires_grad)
        found = value.detach()
        for dim, size in enumerate(shape_of(node)):
            if size.is_Integer:
                continue
            index = self._index(size, value.shape[dim], sizes, rows, samples)
            if size == self.sequence and is_position(found, dim):
                found = recounted(found, dim, index)
            else:
                found = found.index_select(dim, index.to(value.device))
        if redraw and found.shape != value.shape:
            found = _redrawn(found, value)
        return self._laid_out(node, found, sizes).requires_grad_(value.requires_grad)

    def _index(self, size: sympy.Expr, real: int, sizes: ShortSizes, rows: Tensor, samples: Tensor) -> Tensor:
        """Which positions of a dim are taken."""
        short = int(size.subs(sizes.values))
        more = size - self.sequence
        if size == self.batch:
            return samples
        if more.is_Integer:
            number = int(more)
            found = (
                torch.cat([rows, torch.arange(number, device="cpu") + self.total])
                if number > 0
                else rows[:short]
            )
            return found % max(1, real)
        return torch.arange(short, device="cpu") % max(1, real)

    def _laid_out(self, node: Node, value: Tensor, sizes: ShortSizes) -> Tensor:
        """A copy with the strides that the graph was captured for."""
        strides = [int(expression(s).subs(sizes.values)) for s in tensors_of(node)[0].stride()]
        if any(s == 0 and n > 1 for s, n in zip(strides, value.shape, strict=True)):
            return value.clone()
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)

    # ---- which rows

    def _states(self) -> list[Tensor]:
        """Of each input with a label or a flag for each row: (B or 1, T) bool, what counts."""
        found = []
        for node, value in zip(self.placeholders, self.inputs, strict=True):
            if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
                continue
            dims = [d for d, s in enumerate(shape_of(node)) if s == self.sequence]
            if len(dims) == 1 and value.dim() <= 2 and value.numel():
                counts = (value >= 0) if value.dtype != torch.bool and bool((value < 0).any()) else value != 0
                found.append(counts.movedim(dims[0], -1).reshape(-1, self.total).cpu())
        return found

    def _samples(self, sizes: ShortSizes) -> Tensor:
        """Those with the most and the fewest rows that count, in their order."""
        if self.batch is None or sizes.samples is None:
            return torch.arange(0, device="cpu")
        real, wanted = self.real[self.batch], sizes.samples
        if wanted >= real:
            return torch.arange(wanted, device="cpu") % real
        counts = sum(
            (s.sum(1) for s in self._states() if s.shape[0] == real),
            torch.zeros(real, dtype=torch.int64, device="cpu"),
        )
        order = torch.argsort(counts, stable=True)
        half = wanted // 2
        return torch.cat([order[:half], order[len(order) - (wanted - half) :]]).sort().values

    def _rows(self, count: int, samples: Tensor, behind: int | None = None) -> Tensor:
        """Which rows: (count,), ascending. See NOTE [which rows]."""
        if count >= self.total:
            return torch.arange(count, device="cpu") % self.total
        states = []
        for state in self._states():
            is_own = len(samples) and self.batch is not None and state.shape[0] == self.real.get(self.batch)
            states.append(state[samples] if is_own else state)
        if behind is None:
            return self._spread(states, 0, self.total, count)
        end = min((_last(own) for own in states), default=self.total)
        behind = max(0, min(behind, self.total - end, count - 1))
        if not behind or count - behind > end:
            return self._spread(states, 0, self.total, count)
        before = self._spread(states, 0, end, count - behind)
        return torch.cat([before, self._spread(states, end, self.total, behind)])

    def _spread(self, states: Sequence[Tensor], first: int, stop: int, count: int) -> Tensor:
        """So many of the rows [first, stop), of every stretch."""
        change = torch.zeros(self.total, dtype=torch.bool, device="cpu")
        for state in states:
            change[1:] |= (state[:, 1:] != state[:, :-1]).any(0)
        starts = [first, *(k for k in change.nonzero().flatten().tolist() if first < k < stop)]
        if len(starts) > max(1, count // 3):
            return torch.linspace(first, stop - 1, count, dtype=torch.float64, device="cpu").round().long()
        lengths = [b - a for a, b in itertools.pairwise([*starts, stop])]
        taken = _shares(lengths, count)
        spread = [
            start + torch.linspace(0, length - 1, n, dtype=torch.float64, device="cpu").round().long()
            for start, length, n in zip(starts, lengths, taken, strict=True)
        ]
        return torch.cat(spread)


def _last(state: Tensor) -> int:
    """Rows up to the last that counts, in the sample with the fewest; samples without any do not count."""
    own = state[state.any(1)]
    ends = (torch.arange(state.shape[1], device="cpu") + 1) * own
    return int(ends.amax(1).min()) if len(own) else state.shape[1]


def _shares(lengths: Sequence[int], count: int) -> list[int]:
    """`count` rows over stretches, as evenly as their lengths allow."""
    taken = [0] * len(lengths)
    while sum(taken) < count:
        open_ones = [k for k, n in enumerate(lengths) if taken[k] < n]
        taken[min(open_ones, key=lambda k: taken[k])] += 1
    return taken


def is_position(value: Tensor, dim: int) -> bool:
    """True for integers that mostly count up along a dim."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.shape[dim] < 2:
        return False
    return bool(((value.diff(dim=dim) == 1).float().mean() >= 0.5).item())


def recounted(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """Some rows of positions, counted on: where a run of positions begins it begins with its first one.

    Args:
        value: positions, integers, of any shape.
        dim: that of the rows.
        index: (rows that are taken,), int64.

    Returns:
        The shape and dtype of `value`, with as many entries in `dim` as `index` has.
    """
    moved = value.movedim(dim, -1)
    breaks = torch.nn.functional.pad(moved.diff(dim=-1) != 1, (1, 0))
    runs = breaks.cumsum(-1)[..., index.to(value.device)]
    steps = torch.arange(moved.shape[-1], device=value.device)
    begins = torch.where(breaks, steps, 0).cummax(-1).values[..., index.to(value.device)]
    first = moved.gather(-1, begins)
    place = torch.zeros_like(first)
    for k in range(1, len(index)):
        same = runs[..., k] == runs[..., k - 1]
        place[..., k] = torch.where(same, place[..., k - 1] + 1, 0)
    return (first + place).movedim(-1, dim)


@torch.no_grad()
def varied(value: Any, seed: int) -> Any:
    """A parameter of any shape and dtype; of one that is the same number everywhere another one near it."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < 2:
        return value
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return value
    some = value.flatten()[:64] if value.is_contiguous() else value
    if not bool((some == some.flatten()[0]).all()) or not bool((value == value.flatten()[0]).all()):
        return value
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    found = value + VARIED * drawn.to(value.device, value.dtype)
    return found.requires_grad_(value.requires_grad)


def _redrawn(value: Tensor, real: Tensor) -> Tensor:
    """The same without what is ignored: negative integers and zeros of flags become other values."""
    if value.is_floating_point() or value.is_complex():
        return value
    if value.dtype == torch.bool or bool(((real == 0) | (real == 1)).all()):
        return torch.ones_like(value) if value.dim() <= 2 else value
    generator = torch.Generator().manual_seed(value.numel())
    high = int(real.max()) + 1
    drawn = torch.randint(0, max(1, high), value.shape, generator=generator, device="cpu").to(value)
    return torch.where(value < 0, drawn, value)
