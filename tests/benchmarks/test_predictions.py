"""The cost model's peak beside the peak of live tensors and that of a process, for twelve steps."""

import sys
from pathlib import Path

import pytest

from benchmarks.predictions import CASES, main, peaks

PAGE = Path(__file__).parents[2] / "docs" / "reading_a_schedule.md"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from Linux")


@pytest.mark.slow  # `tests/e2e/memory/test_cost.py` compares with live tensors by default
@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_peak_is_what_is_measured(case):
    """Within 8% of live tensors; within 15% of the process, whose kernels and allocator need some more."""
    found = peaks(case)
    assert found.live > 20 * 2**20, "small steps measure bookkeeping"
    assert found.predicted == pytest.approx(found.live, rel=0.08)
    assert found.predicted == pytest.approx(found.process, rel=0.15)


def test_cases_vary_in_everything():
    assert len(CASES) == len({str(c) for c in CASES}) == 12
    assert len({c.config for c in CASES}) >= 4
    assert {c.dtype for c in CASES} == {"float32", "bfloat16", "float64"}
    assert len({c.seq_len for c in CASES}) >= 4 and len({c.chunk for c in CASES}) >= 4
    assert {k for c in CASES for k in c.policy} == {"save", "every", "offload"}


def test_the_page_shows_these_cases(capsys):
    assert main(["--only", "none of them"]) == 0
    head = capsys.readouterr().out.splitlines()
    page = PAGE.read_text()
    assert "\n".join(head) in page
    for case in CASES:
        assert f"| {case.config} | {case.seq_len:,} | {case.chunk:,} | {case.dtype} |" in page, case
