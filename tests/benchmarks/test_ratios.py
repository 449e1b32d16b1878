"""Ratios: against checkpointing, against what is required, against what was recorded."""

import pytest

from benchmarks.cases import CASES, QUICK, Workload, floor_bytes_per_token
from benchmarks.measuring import Result
from benchmarks.modes import MODES, Setup
from benchmarks.ratios import RECORDED, Ratio, compare, met, near, read_recorded, write_recorded

STEP = Workload("qwen3", 64, 16)


def _result(mode, peak, *seconds):
    return Result(STEP, MODES[mode], peak, list(seconds), 1.0)


PEER = _result("checkpointing", 1000, 10.0, 9.0, 12.0)


def test_ratios_are_of_peaks_and_of_medians():
    ratio = Ratio.of(_result("streamed", 100, 8.0, 5.0, 7.0), PEER)
    assert ratio == Ratio(10.0, 0.7)
    assert Ratio.of(_result("streamed", 100), PEER) == Ratio(10.0, None)
    assert Ratio.of(None, PEER) == Ratio(None, None)
    assert PEER.spread == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(9.5, 0.92), True),
        (Ratio(9.49, 0.92), False),
        (Ratio(9.5, 0.93), False),
        (Ratio(20.0, None), None),
    ],
)
def test_both_requirements_have_to_be_met(ratio, verdict):
    assert met(CASES["dense"], ratio) is verdict


def test_within_fifteen_per_cent_on_both_figures():
    beside = _result("reference", 100, 10.0)
    assert near(_result("streamed", 114, 11.4), beside) is True
    assert near(_result("streamed", 116, 9.0), beside) is False
    assert near(_result("streamed", 90, 11.6), beside) is False
    assert near(_result("streamed", 90), beside) is None


def _ratios(memory, time):
    return {"dense": {"streamed": {"memory": memory, "time": time}}}


@pytest.mark.parametrize(
    ("memory", "time", "worse"),
    [
        (10.0, 0.8, []),
        (9.2, 0.87, []),  # less than 10% worse
        (9.0, 0.8, ["memory"]),  # the peak has grown by 11%
        (10.0, 0.89, ["time"]),
        (8.0, 1.0, ["memory", "time"]),
        (20.0, 0.4, []),
        (None, 0.8, ["memory"]),  # what was recorded has to be measured
    ],
)
def test_the_check_fails_where_a_ratio_is_ten_per_cent_worse(memory, time, worse):
    findings = compare(_ratios(memory, time), _ratios(10.0, 0.8))
    assert [f.what for f in findings if not f.ok] == worse


def test_a_recorded_mode_that_is_gone_fails_and_a_new_one_does_not():
    recorded = _ratios(10.0, 0.8)
    assert [f.ok for f in compare({}, recorded)] == [False, False]
    assert [f.ok for f in compare(recorded, {})] == [True, True]


def test_the_tolerance_is_a_choice():
    findings = compare(_ratios(9.0, 0.8), _ratios(10.0, 0.8), tolerance=0.2)
    assert all(f.ok for f in findings)
    assert findings[0].worse_by == pytest.approx(1 / 9)


def test_what_is_recorded_is_read_again(tmp_path):
    path = tmp_path / "recorded.json"
    write_recorded(_ratios(10.12345, None), {"torch": "2"}, path)
    assert read_recorded(path) == _ratios(10.123, None)


def test_the_recorded_ratios_are_of_the_quick_cases():
    recorded = read_recorded(RECORDED)
    assert set(recorded) == set(QUICK)
    for name, modes in recorded.items():
        assert CASES[name].mode in modes
        assert all(r["memory"] > 0 and r["time"] > 0 for r in modes.values())


def test_the_floor_of_a_token():
    config = CASES["dense"].workload.config
    assert floor_bytes_per_token(config) == 4 * 512 * 4 + 2 * 512 * 4 + 4 * 256 * 4
    assert floor_bytes_per_token(config, "bfloat16") * 2 == floor_bytes_per_token(config)
    neox = CASES["gpt_neox"].workload.config
    assert floor_bytes_per_token(neox) == (4 + 2 + 4) * 512 * 4


def test_modes_say_what_they_need():
    assert MODES["liger"].unavailable(Setup(), "qwen3") == "needs CUDA"
    assert "not given" in MODES["published"].unavailable(Setup(), "qwen3")
    assert "Qwen3" in MODES["reference"].unavailable(Setup(reference="here"), "llama")
    assert MODES["streamed"].unavailable(Setup(), "gpt_neox") is None
