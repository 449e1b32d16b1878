"""Lists of segments are shown as repetitions, and nothing is lost or shown twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streambp_fx.passes.s6_schedule.repeats import repeats


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("", []),
        ("EH", [(0, 1, 1), (1, 1, 1)]),
        ("ELLLLH", [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
        ("ESSSFSSSFH", [(0, 1, 1), (1, 4, 2), (9, 1, 1)]),
        ("ESSFSSFSSH", [(0, 1, 1), (1, 3, 2), (7, 1, 2), (9, 1, 1)]),
    ],
)
def test_patterns(keys: str, found: list[tuple[int, int, int]]) -> None:
    assert [(r.start, r.period, r.times) for r in repeats(keys)] == found


@given(st.text("abc", max_size=24))
def test_every_entry_is_covered_once_and_by_its_own_kind(keys: str) -> None:
    found = repeats(keys)
    assert "".join(keys[r.start : r.start + r.period] * r.times for r in found) == keys
    assert [r.start for r in found] == [0, *(r.stop for r in found)][: len(found)]
