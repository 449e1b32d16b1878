"""What a recurrence holds, from a few numbers of rows, at all others."""

from __future__ import annotations

import pytest
import sympy

from streambp_fx.passes.cost.recurrences import _by_blocks

ROWS = sympy.Symbol("rows", integer=True, positive=True)


@pytest.mark.parametrize("block", [16, 64, 512])
def test_within_a_block_and_beyond(block: int) -> None:
    """A square within a block; beyond, each block as much as the one before, the last one filled up."""

    def held(rows: int) -> int:
        of_block = 3 * block**2 + 40 * block + 1000
        return 3 * rows**2 + 40 * rows + 1000 if rows <= block else -(-rows // block) * of_block

    found = _by_blocks(ROWS, held)
    for rows in (1, 5, 40, 100, 200, 300, 512, 700, 1024, 5000):
        assert int(found.subs(ROWS, rows)) == pytest.approx(held(rows), rel=0.02), rows


def test_in_even_steps() -> None:
    found = _by_blocks(ROWS, lambda rows: 100 * rows + 7)
    for rows in (16, 48, 512, 4096):
        assert int(found.subs(ROWS, rows)) == pytest.approx(100 * rows + 7, rel=0.01)
