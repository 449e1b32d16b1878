"""Mutants that must be caught, in functions that exactness rests on: each makes a claim that is not true.

They are in `hand_picked.json`: a text of a module that occurs once, what stands in its place, what is claimed
then.
"""

from __future__ import annotations

import json
from pathlib import Path

from .changes import Mutant


def hand_picked(root: Path) -> list[Mutant]:
    """The mutants of the list.

    Raises:
        ValueError: a text does not occur, or more than once: the list is to be brought up to date.
    """
    found = []
    for entry in json.loads(Path(__file__).with_suffix(".json").read_text()):
        path, was, now = entry["path"], entry["was"], entry["now"]
        source = (root / path).read_text()
        if source.count(was) != 1:
            raise ValueError(f"{path}: {source.count(was)} times, not once: {was!r}")
        line = source[: source.index(was)].count("\n") + 1
        found.append(Mutant(path, line, was, now, source.replace(was, now)))
    return found
