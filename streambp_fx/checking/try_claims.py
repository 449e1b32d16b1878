"""The claims of each distinct segment, tried on the short inputs of a self-check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..passes.graph.facts import Facts
from ..passes.step.row_chunks import split_rows
from ..probing.probe import IndependenceProbe
from .first_wrong_op import Blame
from .short_inputs import ShortSizes


def contradicted(facts: Facts, given: Sequence[Any], sizes: ShortSizes) -> Blame | None:
    """The first op that does not read the rows that it is said to read, or None.

    Args:
        facts: of the graph.
        given: short inputs.
        sizes: theirs.
    """
    chunks = split_rows(sizes.rows, sizes.chunk)
    border = chunks[min(1, len(chunks) - 1)][0] - 1
    rows = sorted({max(0, border), sizes.rows // 2} - {sizes.rows - 1}) or [0]
    probe = IndependenceProbe(facts, given, rows, distinct=True)
    probe.run()
    for found in probe.probes:
        if not found.ok:
            claim = f"it was claimed that a row reads {found.reach.name} rows, but {found.contradictions[0]}"
            return Blame(claim, found.segment, found.op, found.line)
    return None
