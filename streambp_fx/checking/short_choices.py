"""Which short steps a self-check takes: such as run what the real step runs, and others beside them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..runtime.executor import Executor
from ..runtime.step_kinds import StepKind
from .short_inputs import (
    ROWS_LEFT_OUT,
    SAMPLES,
    SAMPLES_LEFT_OUT,
    Cut,
    ShortSizes,
    candidates,
    varied,
    wanted_rows,
)

log = logging.getLogger(__name__)
# Short sizes on which running the captured graph is tried.
TRIED = 4
# Of a short step of the same kind, see `Choices._likeness`.
ALIKE = 4


class Choices:
    """Short sizes and inputs for the check of a kind of step.

    Args:
        executor: what runs the steps.
        cut: cuts the inputs of the real step.
        kind: of the real step.
        fixed: positions of parameters that no step changes.
    """

    def __init__(self, executor: Executor, cut: Cut, kind: StepKind, fixed: Collection[int]) -> None:
        self.executor, self.cut, self.kind, self.fixed = executor, cut, kind, fixed

    def first(self) -> Iterator[tuple[ShortSizes, Callable[[], list[Any]]]]:
        """Short sizes and inputs, the best first: such that the step is of the same kind."""
        every = list(self._sizes())
        best: tuple[ShortSizes, int | None] | None = None
        most = 0
        whole = [self._as_whole(sizes) for sizes in every]
        for sizes, behind in ((s, b) for s in (*every, *whole) for b in self._ends(s)):
            kind = self.kind_of(sizes, self._cut(sizes, behind))
            likeness = self._likeness(kind)
            if likeness > most:
                most, best = likeness, (sizes, behind)
            if likeness == ALIKE:
                break
        if best is not None and best != (every[0], None):
            yield best[0], functools.partial(self._cut, *best)
        for sizes in every:
            for redraw in (False, True):
                yield sizes, functools.partial(self.cut.to, sizes, redraw)

    def others(self, sizes: ShortSizes, given: list[Any]) -> Iterator[tuple[ShortSizes, list[Any]]]:
        """Other sizes and data; data alone.

        NOTE [where samples end]: rows that have no part in the loss may be left out. One too many would be
        seen if the last row that has one were the first of a chunk; labels may be those of the next row. So
        the last row is the first of a chunk in `first`, and the second here.
        """
        other = self.other_sizes(sizes)
        if other is not None:
            for redraw, behind in ((True, None), (False, other.behind(2)), (False, None)):
                yield other, self.varied(self.cut.turned(self.cut.to(other, redraw, behind), other))
        yield sizes, self.varied(self.cut.turned(self.cut.to(sizes, redraw=True), sizes))
        yield sizes, self.cut.turned(given, sizes)

    def other_sizes(self, sizes: ShortSizes) -> ShortSizes | None:
        """Those of the second step; None if the graph was not captured for them."""
        other = sizes.another(self.cut.sequence, self.cut.batch)
        return other if self._captured_for(other) else None

    def _ends(self, sizes: ShortSizes) -> tuple[int | None, ...]:
        """How many rows may lie behind the last that counts, the best first."""
        in_a_chunk = (sizes.behind(1), 2)
        return (*in_a_chunk, None) if self.kind.left_out else (None, *in_a_chunk)

    def _likeness(self, kind: StepKind | None) -> int:
        """How much of what the step runs, and of where its flags are 0, a short step of a kind has."""
        if kind is None or kind.way != self.kind.way:
            return 0
        return 1 + 2 * kind.covers(self.kind) + (kind.flags == self.kind.flags)

    def kind_of(self, sizes: ShortSizes, given: Sequence[Any]) -> StepKind | None:
        """The kind of the streamed short step; None if it fails."""
        try:
            return self.executor.kind(given, sizes.chunk, sizes.loss_chunk)
        except Exception:
            log.info("a short step cannot be prepared", exc_info=True)
            return None

    def _as_whole(self, sizes: ShortSizes) -> ShortSizes:
        """The same in one chunk, where that is what the step has."""
        total, chunks = self.cut.real[self.cut.sequence], (self.kind.chunk, self.kind.loss_chunk)
        own = (sizes.chunk, sizes.loss_chunk)
        chunk, loss_chunk = (sizes.rows if c >= total else o for c, o in zip(chunks, own, strict=True))
        return dataclasses.replace(sizes, chunk=chunk, loss_chunk=loss_chunk)

    def _cut(self, sizes: ShortSizes, behind: int | None) -> list[Any]:
        return self.cut.to(sizes, behind=behind)

    def varied(self, values: list[Any]) -> list[Any]:
        """The same; parameters that are one number everywhere, as zero or one, are not.

        A branch that is multiplied by zeros gives other parameters no gradient, and a weight of ones may be
        left out: it would be seen in the second step.
        """
        return [varied(v, k) if k in self.fixed else v for k, v in enumerate(values)]

    def _sizes(self) -> Iterator[ShortSizes]:
        """Short sizes that the graph was captured for."""
        wanted, chunks = wanted_rows(self.executor.facts), (self.kind.chunk, self.kind.loss_chunk)
        several, wanted = (
            (SAMPLES_LEFT_OUT, max(wanted, ROWS_LEFT_OUT)) if self.kind.left_out else (SAMPLES, wanted)
        )
        every = candidates(self.cut.real, self.cut.sequence, self.cut.batch, wanted, chunks, several)
        return itertools.islice(filter(self._captured_for, every), TRIED)

    def _captured_for(self, sizes: ShortSizes) -> bool:
        """True if what capture assumed about sizes holds for these."""
        guards = self.executor.guards
        return all(test(*(sizes.values[s] for s in symbols)) for symbols, test in guards)
