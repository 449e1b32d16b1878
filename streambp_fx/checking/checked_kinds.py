"""Which kinds of steps of a compiled graph have been checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from ..runtime.step_kinds import StepKind
from ..schedule import Schedule
from .result import SelfCheck
from .self_check import LAZY, LAZY_LEFT_OUT, PARTS
from .short_inputs import wanted_rows


class Record:
    """Of one version of a graph.

    NOTE [kinds of steps]: which programs a step runs depends on its data: whether masks hide more than later
    rows, whether rows are left out, whether some row sees nothing. So each kind of step is checked before its
    first result, once, and once more where flags are 0 in other places (NOTE [where flags are 0]). If no
    short step is of that kind the check says so, and is not tried again.

    Args:
        schedule: of the graph.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.wanted = schedule, wanted_rows(schedule.facts)
        # By the way of a step and where its flags are 0: tokens of the short sequence at most, and the traces
        # that have been checked.
        self.ways: dict[Hashable, tuple[int, frozenset[Hashable]]] = {}
        self.first: Hashable = None
        self.parts = dict.fromkeys(PARTS, 0)

    def has(self, kind: StepKind, tokens: int) -> bool:
        """True if a step of this kind has been checked, and on no sequence that was much too short."""
        rows, programs = self.ways.get((kind.way, kind.flags), (0, frozenset()))
        return self._enough(rows, tokens) and programs >= kind.programs

    def missing(self, tokens: int) -> frozenset[str]:
        """What has not been checked with any kind of step."""
        return frozenset(p for p, rows in self.parts.items() if not self._enough(rows, tokens))

    def _enough(self, rows: int, tokens: int) -> bool:
        return rows >= min(self.wanted, tokens // 2 + 1)

    def note(self, kind: StepKind, tokens: int, found: SelfCheck) -> None:
        """Keep what was found, here and in the schedule."""
        rows = min(tokens, self.wanted)
        for own in (kind, found.kind):
            if own is not None:
                known = self.ways.get((own.way, own.flags), (0, frozenset()))
                self.ways[own.way, own.flags] = rows, known[1] | own.programs
        skipped = {LAZY} if LAZY_LEFT_OUT in found.left_out else set()
        self.parts.update(dict.fromkeys(set(PARTS) - skipped, rows))
        before = self.schedule.check
        if before is None or not found.ok:
            self.first, self.schedule.check = kind.way, found
        elif kind.way == self.first:
            self.schedule.check = dataclasses.replace(found, others=before.others)
        else:
            others = (*(o for o in before.others if o[0] != str(kind)), (str(kind), found))
            left = tuple(t for t in before.left_out if t != LAZY_LEFT_OUT or not self.parts[LAZY])
            self.schedule.check = dataclasses.replace(before, others=others, left_out=left)
