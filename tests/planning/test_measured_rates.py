"""Rates of this machine: measured once, kept in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streambp_fx.errors import PlanError
from streambp_fx.passes.cost.work import Work
from streambp_fx.planning import measured_rates
from streambp_fx.planning.compute_rates import ComputeRates
from streambp_fx.planning.measured_rates import Shapes, file_of_rates, rates_here
from streambp_fx.planning.rates import rates


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Measured in a moment, and kept apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_rates, "BUDGET", 0.01)
    monkeypatch.setattr(measured_rates, "SETS", 2)
    monkeypatch.setitem(measured_rates.SHAPES, "cpu", Shapes(32, 64, 64, 96, 128, 2, 16))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_once_and_kept(quick: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    state = torch.get_rng_state()
    found = rates_here(dtype, "cpu")
    assert torch.equal(state, torch.get_rng_state()), "random numbers of the caller's are as they were"
    assert min(found.products, found.attention, found.attention_backward, found.memory, found.call) > 0
    assert dtype in found.lines[0] and "GFLOP/s" in found.lines[0] and file_of_rates().is_file()

    def again(*_: Any) -> None:
        raise AssertionError("it is measured again")

    monkeypatch.setattr(measured_rates, "_measured", again)
    assert rates_here(dtype, "cpu") == found
    with pytest.raises(AssertionError, match="measured again"):
        rates_here(dtype, "cpu", again=True)
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    with pytest.raises(AssertionError, match="measured again"):
        rates_here(other, "cpu")


@pytest.mark.parametrize("text", ["", "[]", "{no JSON"])
def test_a_file_that_cannot_be_read_is_written_anew(quick: Path, text: str) -> None:
    file_of_rates().parent.mkdir(parents=True)
    file_of_rates().write_text(text)
    found = rates_here("float32", "cpu")
    assert rates_here("float32", "cpu") == found


def test_without_a_place_for_the_file(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "streambp_fx").write_text("not a folder")
    assert rates_here("float32", "cpu").products > 0


@pytest.mark.parametrize("dtype", ["int64", "no_such_dtype"])
def test_a_dtype_without_products(quick: Path, dtype: str) -> None:
    with pytest.raises(PlanError, match=dtype):
        rates_here(dtype, "cpu")


def test_seconds_are_a_sum() -> None:
    found = ComputeRates(2.0, 4.0, 8.0, 16.0, 3.0, 5.0, ())
    assert found.seconds(Work(2, 4, 8, 16, 16, 1, 2)) == 1 + 1 + 1 + 2 + 3 + 10
    beside = replace(found, beside=True)
    assert [beside.seconds(Work(2, calls=n)) for n in (0, 1)] == [1, 3], "a device waits for what is called"


def test_a_plan_for_this_machine(quick: Path) -> None:
    found = rates("here", "float32", 25.0)
    assert found.compute == replace(rates_here("float32"), lines=found.compute.lines)
    assert found.peak_bandwidth == 25e9 and rates("here", "float32").bandwidth == 0
