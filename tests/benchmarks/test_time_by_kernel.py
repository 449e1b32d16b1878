"""A step's time is divided into attention, products and the rest."""

from __future__ import annotations

import pytest

from benchmarks.cases import Workload
from benchmarks.kernels import measure, show

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "head_dim": 8}


@pytest.mark.slow
def test_parts_of_a_step() -> None:
    workload = Workload("qwen3", 64, 16, layers=1, changes=tuple(SIZES.items()))
    results = measure(workload, ["checkpointing", "streamed"], 1)
    assert results.keys() == {"checkpointing", "streamed"}
    for attention, products, seconds in results.values():
        assert attention > 0 and products > 0 and attention + products < seconds
    assert show("tiny", results).row_count == 2
