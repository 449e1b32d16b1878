"""The hand-picked mutants are those of today's code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import nearest  # noqa: E402
from mutants.hand_picked import hand_picked  # noqa: E402


def test_each_text_occurs_once() -> None:
    assert len(hand_picked(ROOT)) >= 40


def test_nearest_tests_are_there() -> None:
    named = [
        p
        for path in nearest.MODULES
        for selection in nearest.tests_of(path)
        for p in selection
        if p.startswith("tests/")
    ]
    assert all((ROOT / path).exists() for path in (*nearest.MODULES, *named))
