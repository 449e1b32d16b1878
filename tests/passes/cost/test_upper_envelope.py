"""What a selection of rows holds is the highest of several lines; those that count are found."""

from __future__ import annotations

import random

import numpy
import pytest
import sympy

from streambp_fx.passes.cost.selected_rows import _highest


@pytest.mark.parametrize("number", [1, 2, 3, 10, 40])
def test_no_line_is_above_those_that_are_kept(number: int) -> None:
    """At each number of rows; and each line that is kept is the highest somewhere."""
    for seed in range(4):
        draw = random.Random(seed)
        lines = [(draw.randint(-50, 50), draw.randint(-5, 5)) for _ in range(number)]
        kept = _highest((sympy.Integer(a), sympy.Integer(b)) for a, b in lines)
        assert set(kept) <= set(lines)
        rows = numpy.linspace(0, 150, 20_001)
        values = numpy.array([float(a) + float(b) * rows for a, b in kept])
        numpy.testing.assert_array_equal(values.max(0), numpy.max([a + b * rows for a, b in lines], 0))
        assert set(values.argmax(0)) == set(range(len(kept)))
