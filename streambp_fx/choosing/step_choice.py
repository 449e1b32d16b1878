"""What is left open of a step is chosen by the cost model: chunk, memory policy, chunk of the loss head."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ..cost.held_bytes import Sizes
from ..cost.step import StepCost
from ..options import FEW_ROWS, LONGER_CHUNKS, Options, chunk_sizes
from ..passes.graph.facts import Facts
from ..passes.s3_cut.policy import Policy
from ..passes.step.saving import Saving
from ..runtime.executor import Executor
from ..units import readable
from .saving import Space, choose_saving

# A longer chunk on a GPU may raise the peak of a step to this multiple.
LONGER_PEAK = 1.3
# Smaller chunks are not filled with saved values where their own peak is no smaller than this share of that
# of longer ones: they hardly leave more room.
HARDLY_LESS = 0.95
# A chunk of so many rows (of all sequences together) takes twice the time for what it does: kernels get too
# little to do. It is what the table of chunks in docs/guide.md shows.
SHORT = 16
# Chunks of few rows are not tried where there would be more of them.
MOST_CHUNKS = 1024


@dataclass(frozen=True)
class Choice:
    """What is chosen for a length.

    Attributes:
        policy: what is kept for the backward, and where.
        rows, loss_rows: of a chunk of a layer and of the loss head.
        more: what more memory would buy, to go on with in words, where the policy does not say it.
    """

    policy: Policy
    rows: int
    loss_rows: int
    more: str = ""


#: A policy, and rows of a chunk.
Way = tuple[Policy, int]


@dataclass(frozen=True)
class Terms:
    """Which steps something is chosen for, and what they may take.

    Attributes:
        tokens: of the longest sequence.
        budget: bytes that activations may take; None: it cannot be told.
        left_free: bytes of the budget that are not filled up with saved values.
        others: values of other size symbols (the batch size) by symbol.
        above: sequences have more tokens than this.
        on_cpu: the step runs on a CPU.
        training: there is a backward.
    """

    tokens: int
    budget: int | None = None
    left_free: int = 0
    others: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    above: int = 0
    on_cpu: bool = True
    training: bool = True


class Chooser:
    """Chooses what is left open of the steps of a graph.

    Args:
        facts: of the graph.
        options: of which some are left open.
        policies: that may be chosen, from the least work to the least memory; the first is that of `first`.
        first: what runs the graph with the first policy.
        storing: gives what runs it with another one.
        fills: where inputs alone fit, the rest of the memory is filled with saved values.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        policies: Sequence[Policy],
        first: Executor,
        storing: Callable[[Policy], Executor],
        fills: bool,
    ) -> None:
        self.facts, self.options, self.policies = facts, options, policies
        self.first, self.storing, self.fills = first, storing, fills
        self.costs: dict[Policy, StepCost] = {}
        self.space: Space | None = None

    def choose(self, terms: Terms) -> Choice:
        """What is chosen for some steps."""
        policy, rows, more = self._policy_and_rows(terms)
        found = Choice(policy, rows, self._loss_rows(policy, rows, terms), more)
        return replace(found, rows=self._longer(found, terms))

    def peak(self, choice: Choice, terms: Terms) -> int:
        """Bytes that steps take with a choice, the largest of them."""
        return self._peak(choice.policy, terms, choice.rows, choice.loss_rows)

    # ---- the cost of a step

    def cost(self, policy: Policy) -> StepCost:
        """The cost model of a step with a policy."""
        if policy not in self.costs:
            known = next(iter(self.costs.values()), None)
            self.costs[policy] = StepCost(
                self.facts, self.options.storing(policy), self.storing(policy), known
            )
        return self.costs[policy]

    def _peak(self, policy: Policy, terms: Terms, rows: int, loss_rows: int | None = None) -> int:
        sizes = self._sizes(policy, terms, rows, loss_rows or self._fewest(terms))
        return max(int(self.cost(policy).peak(s).total) for s in sizes)

    def _sizes(self, policy: Policy, terms: Terms, rows: int, loss_rows: int) -> list[Sizes]:
        """Of the steps that may take most: the longest, and those whose chunks are full.

        A step of a few tokens more may have one chunk more, all of them shorter, and then it takes less.
        """
        removed = {s.removed for s in self.facts.segments} if terms.above else set[int]()
        full = (r + (terms.tokens - r) // n * n for n in (rows, loss_rows) for r in removed)
        lengths = dict.fromkeys((terms.tokens, *(n for n in full if terms.above < n)))
        cost = self.cost(policy)
        return [cost.sizes(n, rows, terms.others, loss_rows) for n in lengths]

    def _sequences(self, terms: Terms) -> int:
        return self.first.sequences(terms.others)

    def _fewest(self, terms: Terms) -> int:
        """Rows of a chunk of the loss head where memory is short."""
        return self.options.least_loss_rows(self._sequences(terms))

    # ---- what is chosen

    def _policy_and_rows(self, terms: Terms) -> tuple[Policy, int, str]:
        first, usual = self.policies[0], self._rows_tried(terms)
        rows_tried, budget = [*usual, *self._few_rows(terms)], terms.budget
        if budget is None or len(self.policies) == len(rows_tried) == 1:
            return first, usual[0], ""
        if self.fills and terms.training and first == Policy():
            found = self._with_more_saved(terms, usual)
            if found is not None:
                return found
        times = self._times(terms, rows_tried)
        way = self._first_that_fits(terms, sorted(times, key=times.__getitem__), rows_tried[-1])
        return *way, self._more(terms, way, (first, usual[-1]), times) if self.options.chooses else ""

    def _first_that_fits(self, terms: Terms, ways: Sequence[Way], fewest: int) -> Way:
        """The first of some policies with rows of a chunk that fits, or that which takes least."""
        assert terms.budget is not None
        peaks: dict[Way, int] = {}
        for policy, rows in ways:
            if peaks.get((policy, fewest), 0) > terms.budget:
                continue
            for own in (rows, fewest):
                peaks[policy, own] = self._peak(policy, terms, own)
                if own == rows and peaks[policy, own] <= terms.budget:
                    return policy, rows
        return min(peaks, key=peaks.__getitem__)

    def _times(self, terms: Terms, rows_tried: Sequence[int]) -> dict[Way, float]:
        """Policies with rows of a chunk, and how long a step takes with them, to be compared."""
        samples, most, several = self._sequences(terms), rows_tried[0], len(self.policies) > 1
        work = {p: self._work(p, terms, most) if several else 1 for p in self.policies}
        ways = itertools.product(self.policies, rows_tried)
        return {way: work[way[0]] * (1 + SHORT / (way[1] * samples)) for way in ways}

    def _more(self, terms: Terms, way: Way, usual: Way, times: Mapping[Way, float]) -> str:
        """What more memory would buy where little is there: the first policy, in chunks of usual length."""
        more = self._peak(usual[0], terms, usual[1]) - self._peak(way[0], terms, way[1])
        faster = times[way] / times[usual] - 1
        if more <= 0 or faster <= 0:
            return ""
        rows = min(usual[1], terms.tokens)
        return f"; {readable(more)} more would do to {usual[0]} in chunks of {rows} rows: {faster:.0%} faster"

    def _work(self, policy: Policy, terms: Terms, rows: int) -> int:
        """Operations of a step."""
        cost = self.cost(policy)
        sizes = cost.sizes(terms.tokens, rows, terms.others, self._fewest(terms))
        return sum(int(m.flops) for m in cost.timeline(sizes))

    def _rows_tried(self, terms: Terms) -> list[int]:
        """Rows of a chunk that are tried, the most first; see NOTE [longer chunks on GPUs]."""
        if self.options.chunk != "auto":
            return [self.options.rows]
        samples = self._sequences(terms)
        sizes = chunk_sizes(samples)
        fills_gpu = self.options.chooses and not terms.on_cpu
        longer = [n // samples for n in LONGER_CHUNKS if n // samples > sizes[0]] if fills_gpu else []
        found = [*longer, *sizes]
        return [found[0], *(n for n in found[1:] if n < terms.tokens)]  # the others are one chunk, too

    def _few_rows(self, terms: Terms) -> list[int]:
        """So few that a chunk takes more time: tried where `memory` is named and nothing fits with more."""
        if self.options.chunk != "auto" or self.options.memory is None:
            return []
        most = min(self._rows_tried(terms)[-1], terms.tokens)
        return [n for n in FEW_ROWS if n < most and n * MOST_CHUNKS >= terms.tokens]

    def _with_more_saved(self, terms: Terms, rows_tried: Sequence[int]) -> tuple[Policy, int, str] | None:
        """Rows of a chunk, and a policy that stores inputs and what the rest of the memory has room for.

        Smaller chunks, of a layer or of the loss head, leave more room, and take more time for the rest. They
        are taken where less is computed then; if it is as much, chunks are as long as can be. So more memory
        never leads to more work. On a GPU it goes to longer chunks first.

        Args:
            rows_tried: of a chunk, the most first.

        Returns:
            None if inputs alone do not fit.
        """
        heads = dict.fromkeys((self.options.loss_rows(self._sequences(terms)), self._fewest(terms)))
        assert terms.budget is not None
        tried: list[tuple[tuple[int, int], Policy, int, str]] = []
        filled: int | None = None  # the least peak of those that are filled, if they fit
        for rows, loss_rows in itertools.product(rows_tried, heads):
            least = self._peak(Policy(), terms, rows, loss_rows)
            fills = filled is None or not terms.on_cpu or least < HARDLY_LESS * filled
            filled = least if fills else filled
            if least > terms.budget:
                continue
            sizes, *alike = self._sizes(Policy(), terms, rows, loss_rows)
            self.space = Space(self.cost(Policy()), sizes, self.space, alike)
            room = max(least, terms.budget - terms.left_free) if fills else least
            found = choose_saving(self.space, room, least)
            work = int(sum(m.flops for m in self.space.timeline(found.saving)))
            more = "" if found.spared else self.space.more()
            tried.append(((work, self.space.again - found.spared), found.policy, rows, more))
            if not terms.on_cpu:
                break
        # the first of those that are alike
        return min(tried, key=lambda way: way[0])[1:] if tried else None

    def _longer(self, found: Choice, terms: Terms) -> int:
        """Rows of a chunk of a layer: more than were chosen, if the step's peak is little above what it is.

        NOTE [longer chunks on GPUs]: a GPU takes less time for a few long kernels than for many short ones: a
        step of 16,384 tokens, 8 layers of Qwen3-8B's sizes, takes 0.84 s in chunks of 2048 rows and 0.76 s in
        chunks of 8192, with the same peak, which is in the loss head (one H100, docs/gpu.md). Saving 16 GiB
        spares no time in chunks of 2048 rows, and a seventh in those of 8192 (H200). So where there is
        memory to fill, longer chunks come first.

        Experts need them most: each chunk reads all weights, and makes a gradient as large as they are. In
        chunks of 2048 rows a step of 16,384 tokens of Qwen3-30B-A3B's layers took 1.8 of checkpointing's time
        on an H200. So the peak may be `LONGER_PEAK` of what it would be; for those layers that is still a
        sixth of checkpointing's.
        """
        chosen_for_rows = isinstance(found.policy.save, Saving)  # what is saved of which chunk
        if self.options.chunk != "auto" or chosen_for_rows or terms.on_cpu:
            return found.rows
        samples = self._sequences(terms)
        peak = functools.partial(self._peak, found.policy, terms, loss_rows=found.loss_rows)
        longer = (
            n // samples for n in LONGER_CHUNKS if found.rows < n // samples and found.rows < terms.tokens
        )
        least, budget = peak(found.rows), terms.budget
        most = LONGER_PEAK * least if budget is None else max(least, min(LONGER_PEAK * least, budget))
        return next((rows for rows in longer if peak(rows) <= most), found.rows)

    def _loss_rows(self, policy: Policy, rows: int, terms: Terms) -> int:
        """As many rows of the loss head at once as the step has memory for at its peak, wherever that is."""
        samples = self._sequences(terms)
        usual, least = self.options.loss_rows(samples), self.options.least_loss_rows(samples)
        if terms.tokens <= least or not terms.training:
            return usual
        peak = functools.partial(self._peak, policy, terms, rows)
        if usual > least and terms.budget is not None and peak(usual) > terms.budget:
            return least
        tried = [usual, *self.options.more_loss_rows(samples)]
        if len(tried) == 1:
            return usual
        return tried[bisect.bisect_right(tried, peak(usual), lo=1, key=peak) - 1]
