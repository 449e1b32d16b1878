"""The memory of one training step, eager, checkpointed and streamed, on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy

from ..cost import eager_step
from ..cost.eager_step import UnstreamedMoment
from ..cost.held_bytes import BATCH, CHUNK, LOSS_CHUNK, TOKENS, Moment, Sizes
from ..cost.step import StepCost
from .scheduled_step import ScheduledStep

#: A part of the step: the phase and the segment that runs.
Slot = tuple[str, int]
#: What is compared, in the order of tables and legends.
WAYS = ("eager", "checkpointing", "streamed")


@dataclass(frozen=True, eq=False)
class StepMemory:
    """What one training step of a schedule holds when.

    Attributes:
        schedule: the schedule, for a known sequence length.
        cost: its cost model.
        sizes: the sizes of the step, as numbers.
        streamed: the step, moment by moment, as `StepCost.timeline` gives it; bytes.
        checkpointing, eager: the same step unstreamed, as `cost.eager_step.timeline` gives it; bytes.
    """

    schedule: ScheduledStep
    cost: StepCost
    sizes: Sizes
    streamed: list[Moment]
    checkpointing: list[UnstreamedMoment]
    eager: list[UnstreamedMoment]
    _expressions: dict[str, sympy.Expr] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(schedule: ScheduledStep) -> StepMemory:
        """The memory of a schedule's step, for its sequence length or else that of the captured call.

        Raises:
            ValueError: nothing of the graph is streamed.
        """
        if not schedule.segments:
            raise ValueError("the graph runs unstreamed: there is no schedule to show")
        own = schedule if schedule.seq_len is not None else schedule.for_length()
        assert own.seq_len is not None
        known = schedule._memory
        if not isinstance(known, StepMemory) or (known.sizes.tokens, known.schedule.options) != (
            own.seq_len,
            own.options,
        ):
            sizes = own.cost.sizes(own.seq_len)
            eager, checkpointing = (eager_step.timeline(own.cost, sizes, c) for c in (False, True))
            known = StepMemory(own, own.cost, sizes, own.timeline(), checkpointing, eager)
            schedule._memory = known
        return known

    # ---- peaks

    def peak(self, way: str) -> int:
        """Peak bytes of one of `WAYS`, over weights, their gradients and the inputs."""
        return int(max(m.total for m in getattr(self, way)))

    def peak_expression(self, way: str) -> sympy.Expr:
        """Peak bytes of one of `WAYS` in T and other sizes; if streamed, in chunk and loss_chunk too."""
        if way not in self._expressions:
            if way == "streamed":
                self._expressions[way] = self.cost.peak_expression()
            else:
                self._expressions[way] = eager_step.peak_expression(self.cost, way == "checkpointing")
        return self._expressions[way]

    def peak_by_length(self, way: str) -> Callable[[int], float]:
        """Peak bytes of one of `WAYS` as a function of the sequence length in tokens.

        A chunk is never longer than the sequence.
        """
        expression, known = self.peak_expression(way), self.sizes.others
        known = {BATCH: next(iter(known.values()), 1), **known}
        others = sorted(expression.free_symbols - {TOKENS, CHUNK, LOSS_CHUNK}, key=str)
        function = sympy.lambdify((TOKENS, CHUNK, LOSS_CHUNK, *others), expression, "math")
        values, rows, loss_rows = [known[s] for s in others], self.sizes.chunk, self.sizes.loss_chunk
        return lambda tokens: function(tokens, min(rows, tokens), min(loss_rows, tokens), *values)

    # ---- the time axis

    def slot_of(self, moment: Any) -> Slot:
        """The part of the step that a moment is in."""
        return moment.phase, self._first_of.get(moment.segment, moment.segment)

    @cached_property
    def _first_of(self) -> dict[int, int]:
        """Segments whose loops run as one are one part, under the number of the first."""
        return {s.index: loop[0].index for loop in self.schedule.segments_together for s in loop}

    @cached_property
    def slots(self) -> dict[Slot, tuple[float, float]]:
        """Where each part of the step begins and ends, in [0, 1].

        A part is as wide as its share of the floating-point operations of the streamed step, and at least
        half as wide as an even share: a part of few operations can hold the most memory.
        """
        order: list[Slot] = []
        for way in reversed(WAYS):
            place = 0
            for slot in dict.fromkeys(map(self.slot_of, getattr(self, way))):
                if slot not in order:
                    order.insert(place, slot)
                place = order.index(slot) + 1
        work = dict.fromkeys(order, 0.0)
        for moment in self.streamed:
            work[self.slot_of(moment)] += float(moment.flops)
        least = (sum(work.values()) or 1.0) / len(work) / 2
        widths = {slot: max(amount, least) for slot, amount in work.items()}
        whole, at, found = sum(widths.values()), 0.0, {}
        for slot, width in widths.items():
            found[slot] = (at / whole, (at + width) / whole)
            at += width
        return found

    def starts(self, way: str) -> list[float]:
        """Where each moment of one of `WAYS` begins on the time axis, in [0, 1]."""
        moments: list[Any] = getattr(self, way)
        by_slot: dict[Slot, list[int]] = {}
        for index, moment in enumerate(moments):
            by_slot.setdefault(self.slot_of(moment), []).append(index)
        found = [0.0] * len(moments)
        for slot, own in by_slot.items():
            start, end = self.slots[slot]
            work = [float(getattr(moments[k], "flops", 0)) for k in own]
            whole = sum(work)
            work, whole = (work, whole) if whole else ([1.0] * len(own), float(len(own)))
            before = 0.0
            for index, amount in zip(own, work, strict=True):
                found[index] = start + (end - start) * before / whole
                before += amount
        return found


def drawn(moments: Sequence[Any]) -> list[int]:
    """Indices of the moments that are drawn: of collectives those that hold more than what runs beside them.

    While a collective begins nothing runs, and a picture with each of these moments would be all valleys.
    """
    running = [k for k, m in enumerate(moments) if getattr(m, "collective", None) is None]
    found, place = [], 0
    for index, moment in enumerate(moments):
        if place < len(running) and running[place] == index:
            found.append(index)
            place += 1
            continue
        beside = [moments[running[k]].total for k in (place - 1, place) if 0 <= k < len(running)]
        if all(moment.total > total for total in beside):
            found.append(index)
    return found


def thinned(starts: list[float], totals: list[int], bins: int) -> list[int]:
    """Indices of the moments to draw so that a picture of `bins` columns loses no peak and no valley.

    Of the moments that begin in one column, the one that holds most and the one that holds least are kept.
    """
    columns: dict[int, list[int]] = {}
    for index, start in enumerate(starts):
        columns.setdefault(min(int(start * bins), bins - 1), []).append(index)
    kept: set[int] = set()
    for own in columns.values():
        kept |= {max(own, key=totals.__getitem__), min(own, key=totals.__getitem__)}
    return sorted(kept)
