"""What each chunk of a step saves for its backward, such that most work is spared with the memory there is.

Each chunk of each layer has a frontier of sets of values (`frontier`). To go one corner further spares work
and takes bytes. The steps that spare most for a byte are made first, over all layers and chunks, until the
peak of the step, as the cost model has it, would be above the budget. That is the best that can be done where
all that is saved is held at the peak: a knapsack whose pieces are small.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from ..cost.held_bytes import Moment, Sizes
from ..cost.step import StepCost
from ..passes.cost.work import total
from ..passes.graph.facts import Segment
from ..passes.s3_cut.policy import Policy, groups
from ..passes.s5_lower.programs import Trace
from ..passes.s5_lower.saved_values import operations_per_byte
from ..passes.step.saving import Piece, Price, Saving
from ..runtime.segments.segment_runner import SegmentRunner
from ..units import readable
from .frontier import expressions, frontier


@dataclass(frozen=True)
class Step:
    """One corner further on the frontier of a chunk.

    Attributes:
        segment, chunk: whose.
        corner: that it goes to, from the one before.
        saved: bytes more that are saved.
        spared: operations that need not be computed again.
    """

    segment: int
    chunk: int
    corner: int
    saved: int
    spared: int


class Space:
    """What may be saved in a step of a certain size.

    Args:
        cost: of the step in which nothing is saved but inputs.
        sizes: as numbers.
        known: the space of the same graph for other sizes: its frontiers are not sought again.
        alike: sizes of other steps that save the same, whose peaks count as well.

    Attributes:
        again: operations that are computed again if nothing is saved.
        steps: those that spare most for a byte first.
    """

    def __init__(
        self, cost: StepCost, sizes: Sizes, known: Space | None = None, alike: Sequence[Sizes] = ()
    ) -> None:
        self.cost, self.sizes, self.alike = cost, sizes, alike
        self.prices: dict[Any, list[Price]] = {} if known is None else known.prices
        self.known: dict[Any, tuple[Any, Any]] = {} if known is None else known.known
        self.starts: dict[int, list[int]] = {}
        self.groups = groups(cost.facts, Policy())
        self.again = 0
        self.steps = sorted(self._steps(), key=lambda s: (-s.spared / s.saved, s.segment, -s.chunk))

    @property
    def segments(self) -> Iterator[tuple[Segment, SegmentRunner]]:
        """Those that run by chunks forwards and backwards."""
        calls = list(self.cost.step_program.calls())
        back = {c.segment for c in calls if c.procedure_name == "backward" and not c.way.full}
        for call in calls:
            if call.procedure_name == "forward" and call.segment in back:
                runner = self.cost.executor.runners[call.segment]
                assert runner is not None
                yield self.cost.facts.segments[call.segment], runner

    def prices_of(self, runner: SegmentRunner) -> list[Price]:
        """Of the corners of a segment's frontier, the highest first."""
        extent = self.cost.extents(runner, self.sizes)[-1]
        # as many rows as there are before a chunk on average, to the next power of two
        prefix = 1 << max(0, (extent.prefix // 2 - 1).bit_length()) if extent.prefix > 1 else 0
        key = id(runner.programs), prefix
        if key not in self.prices:
            half = runner.programs.forward_half(self.cost.trace_of(runner, extent))
            self.prices[key] = [c.price for c in frontier(half, prefix) if c.price is not None]
        return self.prices[key]

    def _steps(self) -> Iterator[Step]:
        known: dict[Any, list[list[tuple[int, int]]]] = {}
        for segment, runner in {s.index: (s, r) for s, r in self.segments}.values():
            prices, extents = self.prices_of(runner), self.cost.extents(runner, self.sizes)
            self.starts[segment.index] = [e.start for e in extents]
            key = id(runner.programs), self.cost.plain_of(runner), segment.window, segment.removed
            if key not in known:
                known[key] = [self._corners(runner, extent, prices) for extent in extents]
            self.again += sum(corners[0][1] for corners in known[key])
            apart = self._bytes_apart(segment)
            for chunk, (corners, extent) in enumerate(zip(known[key], extents, strict=True)):
                more = apart * extent.rows // self.sizes.tokens
                yield from _further(segment.index, chunk, corners, more)

    def _bytes_apart(self, segment: Segment) -> int:
        """Bytes that a segment stores only if something of it is saved: else they are looked up again."""
        group = next(g for g in self.groups if segment in g)
        made = (n for other in group[:-1] for n in other.outputs if n in segment.rows)
        return sum(self.cost.bytes_of(n, self.sizes) for n in made)

    def _corners(self, runner: SegmentRunner, extent: Any, prices: list[Price]) -> list[tuple[int, int]]:
        """Bytes saved and operations left of a chunk, where nothing is saved and at each price."""
        traced = self.cost.trace_of(runner, extent)
        found = []
        for price in (None, *prices):
            at = self._expressions(runner, traced, price)
            found.append(tuple(self.cost.value(e, self.sizes, extent) for e in at))
        return found

    def _expressions(self, runner: SegmentRunner, traced: Trace, price: Price | None) -> tuple[Any, Any]:
        key = id(traced), price
        if key not in self.known:
            programs, names = runner.programs, self.cost.names_of(runner, traced)
            saved = [] if price is None else programs.saved(traced, price)
            saved_bytes, left = expressions(programs.forward_half(traced), saved)
            self.known[key] = saved_bytes.subs(names), left.subs(names)
        return self.known[key]

    # ---- savings

    @cached_property
    def saved(self) -> list[int]:
        """Bytes that are saved when so many of the steps are made, from none to all."""
        return [0, *itertools.accumulate(s.saved for s in self.steps)]

    @cached_property
    def spared(self) -> list[int]:
        """Operations that are spared when so many of the steps are made, from none to all."""
        return [0, *itertools.accumulate(s.spared for s in self.steps)]

    def count(self, room: int) -> int:
        """How many steps can be made that save at most so many bytes together."""
        return bisect.bisect_right(self.saved, room) - 1

    def timeline(self, saving: Saving) -> list[Moment]:
        """Of a step that saves something."""
        return self.cost.storing(Policy(saving)).timeline(self.sizes)

    def peak(self, saving: Saving) -> int:
        """Bytes that a step takes which saves something."""
        cost = self.cost.storing(Policy(saving))
        return max(int(cost.peak(sizes).total) for sizes in (self.sizes, *self.alike))

    def later(self, count: int, room: int) -> list[Step]:
        """Steps after the first so many that save at most so many bytes together.

        NOTE [steps that still fit]: where the next step does not fit, later ones may, which save less. With a
        larger budget less may be spared by those, but no less in all: the step that then is made instead
        spares more than all that it takes the place of, which was smaller, and spared no more for a byte.
        """
        found, left_out = list[Step](), set[tuple[int, int]]()
        for step in self.steps[count:]:
            chunk = (step.segment, step.chunk)
            if step.saved <= room and chunk not in left_out:
                found.append(step)
                room -= step.saved
            else:
                left_out.add(chunk)
        return found

    def saving(self, count: int, later: Sequence[Step] = ()) -> Saving:
        """The first so many steps, made, and some later ones."""
        made: dict[int, list[int]] = {k: [0] * len(starts) for k, starts in self.starts.items()}
        for step in (*self.steps[:count], *later):
            made[step.segment][step.chunk] = max(made[step.segment][step.chunk], step.corner)
        runners = self.cost.executor.runners
        pieces = []
        for segment in self.cost.facts.segments:
            corners, runner = made.get(segment.index, []), runners[segment.index]
            prices = self.prices_of(runner) if runner is not None and any(corners) else []
            pieces.append(_pieces(corners, self.starts.get(segment.index, []), self.sizes.tokens, prices))
        saved = self.saved[count] + sum(s.saved for s in later)
        spared = self.spared[count] + sum(s.spared for s in later)
        return Saving(tuple(pieces), self._words(saved, spared))

    def _words(self, saved: int, spared: int) -> str:
        if not saved:
            return "inputs"
        share = spared / self.spared[-1]
        words = f"inputs, and {readable(saved)} that spare {share:.0%} of the recompute"
        return words + self.more(saved, spared)

    def more(self, saved: int = 0, spared: int = 0) -> str:
        """What more memory would buy, to go on with: "; 1.5 GiB more would spare all: 10% faster".

        Args:
            saved: bytes that are saved.
            spared: operations that are spared.
        """
        left = self.saved[-1] - saved
        faster = (self.spared[-1] - spared) / max(1, self.operations - self.spared[-1])
        return f"; {readable(left)} more would spare all: {faster:.0%} faster" if left else ""

    @cached_property
    def operations(self) -> int:
        """Of the step in which nothing is saved, those of the time in which bytes are moved among them."""
        work = total(m.work for m in self.cost.timeline(self.sizes))
        node = self.cost.facts.segments[0].outputs[0]
        return int(work.flops + (work.product_bytes + work.bytes) * operations_per_byte(node))


def _further(segment: int, chunk: int, corners: list[tuple[int, int]], more: int) -> Iterator[Step]:
    """From corner to corner, as far as each step spares something; steps that spare more for a byte than the
    one before are made together with it.

    Args:
        more: bytes that the first step takes besides.
    """
    found: list[Step] = []
    before = corners[0]
    for k, own in enumerate(corners[1:], 1):
        extra = 0 if found else more
        step = Step(segment, chunk, k, own[0] - before[0] + extra, before[1] - own[1])
        if step.saved <= 0 or step.spared <= 0:
            continue
        before = own
        while found and step.spared * found[-1].saved > found[-1].spared * step.saved:
            last = found.pop()
            step = replace(step, saved=step.saved + last.saved, spared=step.spared + last.spared)
        found.append(step)
    yield from found


def _pieces(corners: list[int], starts: list[int], tokens: int, prices: list[Price]) -> tuple[Piece, ...]:
    """Neighbouring chunks of which the same is saved, together."""
    if not any(corners):
        return ()
    found: list[Piece] = []
    ends = [Fraction(start, tokens) for start in starts[1:]] + [Fraction(1)]
    for corner, end in zip(corners, ends, strict=True):
        price = prices[corner - 1] if corner else None
        if found and found[-1].price == price:
            found[-1] = Piece(end, price)
        else:
            found.append(Piece(end, price))
    return tuple(found)


@dataclass(frozen=True)
class Chosen:
    """What is saved, with the peak of the step in bytes, and the operations that are spared."""

    saving: Saving
    peak: int
    spared: int

    @property
    def policy(self) -> Policy:
        """The policy that saves it."""
        return Policy(self.saving) if self.spared else Policy()


def choose_saving(space: Space, budget: int, least: int) -> Chosen:
    """As much work spared as fits a budget.

    Args:
        space: what may be saved.
        budget: bytes that the step may take.
        least: bytes that it takes where nothing is saved, which fits.
    """
    low, high, held = 0, len(space.saved), least  # it fits at low, and not at high
    halved = False
    while high - low > 1:
        # what is saved is held at the peak, so the peak grows by it, or by less; every second time half of
        # what is left is ruled out
        guess = min(max(space.count(space.saved[low] + budget - held), low + 1), high - 1)
        count = (low + high) // 2 if halved else guess
        found = space.peak(space.saving(count))
        low, high, held = (count, high, found) if found <= budget else (low, count, held)
        halved = not halved
    later = space.later(low, budget - held)
    if later:
        saving = space.saving(low, later)
        peak = space.peak(saving)
        if peak <= budget:
            return Chosen(saving, peak, space.spared[low] + sum(s.spared for s in later))
    return Chosen(space.saving(low), held, space.spared[low])
