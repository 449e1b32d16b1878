"""Fits recover what was put in; searches find what fits."""

import pytest

from benchmarks.batch import confirmed, largest
from benchmarks.cases import CASES, Workload
from benchmarks.errors import BenchmarkError
from benchmarks.fits import exponent, slope
from benchmarks.gpu import layers_that_fit
from benchmarks.gpu_models import DENSE
from benchmarks.measuring import Result
from benchmarks.modes import MODES
from benchmarks.sweeps import fitted, workloads


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 1.7, 2.0])
def test_exponents_are_recovered(power):
    sizes = [512, 1024, 4096, 8192]
    assert exponent(sizes, [3.5 * x**power for x in sizes]) == pytest.approx(power, abs=1e-9)


def test_a_slope_is_recovered_whatever_the_offset():
    assert slope([10, 20, 40], [7e6 + 16384 * x for x in (10, 20, 40)]) == pytest.approx(16384)


@pytest.mark.parametrize("fit", [exponent, slope])
def test_one_size_makes_no_line(fit):
    with pytest.raises(BenchmarkError, match="two different sizes"):
        fit([512, 512], [1.0, 2.0])


def test_zero_has_no_logarithm():
    with pytest.raises(BenchmarkError, match="above zero"):
        exponent([1, 2], [0.0, 1.0])


def test_a_sweep_over_tokens_is_held_against_the_floor():
    steps = workloads("tokens", [1024, 2048, 4096], CASES["dense"].workload, quick=False)
    assert [(w.tokens, w.chunk) for w in steps] == [(1024, 512), (2048, 512), (4096, 512)]
    results = [
        Result(w, MODES["streamed"], 5 * 2**20 + 20480 * w.tokens, [1e-9 * w.tokens**2]) for w in steps
    ]
    fit = fitted("tokens", results)
    assert fit["time_exponent"] == pytest.approx(2)
    assert fit["bytes_per_token"] == pytest.approx(20480)
    assert fit["times_floor"] == pytest.approx(20480 / (4 * (6 * 512 + 4 * 256)))
    failed = [Result(w, MODES["streamed"], reason="failed") for w in steps]
    assert fitted("tokens", failed) == {"peak_exponent": None, "time_exponent": None}


def test_sweeps_vary_one_size():
    base = Workload("qwen3", 4096, 1024)
    assert [w.layers for w in workloads("layers", [4, 2], base, False)] == [2, 4]
    assert {(w.tokens, w.chunk) for w in workloads("batch", None, base, False)} == {(2048, 512)}
    with pytest.raises(BenchmarkError, match="above zero"):
        workloads("chunk", [0, 512], base, False)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 37, 64, 1000])
def test_bisection_finds_the_largest(limit):
    assert largest(lambda n: n <= limit) == limit


@pytest.mark.parametrize("guess", [1, 12, 40, 500])
def test_a_wrong_guess_is_corrected_by_measurements(guess):
    """Each sequence takes 10, the rest 50: 45 sequences in 500."""
    asked = []

    def peak_of(batch):
        asked.append(batch)
        return 50 + 10 * batch

    fits, too_many, peaks = confirmed(guess, 500, peak_of, tries=8)
    assert (fits, too_many) == (45, 46)
    assert list(peaks) == asked and len(asked) == len(set(asked))


def test_nothing_fits():
    assert confirmed(4, 100, lambda batch: 1000 * batch)[:2] == (0, 1)


def test_layers_that_fit_a_gpu():
    gib = 2**30
    assert layers_that_fit(DENSE, 80 * gib) == 8
    assert layers_that_fit(DENSE, 80 * gib, most=36) == 36
    assert layers_that_fit(DENSE, 16 * gib) == 4
    assert layers_that_fit(DENSE, 4 * gib) == 1
