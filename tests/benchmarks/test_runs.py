"""Runs in toy sizes, from the command line to tables, files and exit status."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks.session
from benchmarks.__main__ import main
from benchmarks.cases import shrunk

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from Linux")


def _run(tmp_path, *arguments):
    out = tmp_path / "out"
    tiny = ["--tiny", "--threads", "1", "--steps", "1", "--out", str(out)]
    status = main([*tiny, *arguments], Console(width=200))
    return status, json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_two_modes_end_to_end(tmp_path, capsys, monkeypatch):
    """Peaks alone, which takes one process a mode; a mode that cannot run says why.

    The modes are the two that start fastest; the slow tests run the streamed step the same way.
    """
    monkeypatch.setattr(benchmarks.session, "DOCS", tmp_path)
    arguments = ("--case", "dense", "--modes", "checkpointing,eager,liger", "--peak-only", "--docs")
    status, document = _run(tmp_path, *arguments)
    assert status == 0
    case = document["cases"]["dense"]
    results = {r["mode"]: r for r in case["results"]}
    assert results["eager"]["loss"] == pytest.approx(results["checkpointing"]["loss"], rel=1e-5)
    peaks = [results[m]["peak_bytes"] for m in ("eager", "checkpointing")]
    assert min(peaks) > 0
    assert results["eager"]["memory"] == pytest.approx(peaks[1] / peaks[0])
    assert peaks[1] < peaks[0] and results["eager"]["time"] is None
    assert results["liger"]["reason"] == "needs CUDA" and results["liger"]["peak_bytes"] is None
    assert document["environment"]["threads"] > 0
    shown = capsys.readouterr().out
    assert "needs CUDA" in shown and "Required" in shown
    page = _figures(tmp_path)
    assert f"{peaks[0] / 2**20:,.0f} |" in page and "needs CUDA" in page


def _figures(folder):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "_ext" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.benchmark_figures(folder)


def test_the_page_says_so_while_there_are_no_figures(tmp_path):
    assert "No figures" in _figures(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("checkpointing", "float32"), pytest.param("streamed", "bfloat16", marks=pytest.mark.slow)],
)
def test_the_gpu_script_runs_on_a_cpu(tmp_path, mode, dtype):
    """From another folder, without the package on the path: as on a bare machine."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "benchmarks" / "gpu.sh")
    command = [script, str(tmp_path / "out"), "--tiny", "--dtype", dtype, "--modes", f"{mode},liger"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    found = {f["mode"]: f for f in document["found"]}
    exact = found["exactness"]["exact"]
    assert exact["streamed float32"]["gradient_error"] < 1e-5 and f"streamed {dtype}" in exact
    assert [e["tokens"] for e in found[mode]["lengths"]] == [64, 128] and found[mode]["reason"] is None
    assert all(e["peak_bytes"] > 0 and len(e["seconds"]) == 1 for e in found[mode]["lengths"])
    assert found[mode]["longest"]["tokens"] == 256
    assert found["liger"]["reason"] == "needs CUDA"
    assert "needs CUDA" in (tmp_path / "out" / "table.txt").read_text()


@pytest.mark.parametrize("arguments", [[], ["--tiny"]])
def test_the_gpu_script_wants_a_folder(arguments):
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def _with_tokens(case, tokens):
    return replace(case, workload=replace(case.workload, tokens=tokens, chunk=tokens // 4))


@pytest.mark.slow
def test_a_check_against_recorded_ratios(tmp_path, capsys, monkeypatch):
    """Recorded and checked; the check fails once the record is better than what is measured.

    With more tokens than other tests have: a streamed step of 256 takes less than a process holds anyway.
    """
    monkeypatch.setattr(benchmarks.session, "shrunk", lambda case: _with_tokens(shrunk(case), 2048))
    recorded = tmp_path / "recorded.json"
    arguments = ("--case", "dense", "--modes", "checkpointing,streamed", "--recorded", str(recorded))
    assert _run(tmp_path, "--record", *arguments)[0] == 0
    assert _run(tmp_path, "--check", "--tolerance", "9", *arguments)[0] == 0
    document = json.loads(recorded.read_text())
    document["ratios"]["dense"]["streamed"]["memory"] *= 4
    recorded.write_text(json.dumps(document))
    document["ratios"]["dense"]["streamed"]["time"] /= 100
    recorded.write_text(json.dumps(document))
    assert _run(tmp_path, "--check", *arguments)[0] == 1
    said = capsys.readouterr().out
    assert "WORSE" in said
    assert said.count("streamed, time") == 4  # once in each run, and again where it seemed slower


@pytest.mark.slow
def test_a_sweep_and_a_batch(tmp_path, capsys):
    arguments = ("--sweep", "tokens", "--values", "256,512", "--modes", "checkpointing,streamed")
    status, document = _run(tmp_path, *arguments, "--case", "batch", "--budget", "12MiB")
    assert status == 0
    fit = document["sweeps"]["tokens"]["fits"]["checkpointing"]
    assert 0.5 < fit["peak_exponent"] < 1.5 and fit["floor_bytes_per_token"] > 0
    searches = {s["mode"]: s for s in document["batch"]["searches"]}
    for found in searches.values():
        assert found["reason"] is None and found["fits"] >= 1
        assert found["measured"][str(found["fits"])] <= 12 * 2**20
    assert searches["streamed"]["fits"] > searches["checkpointing"]["fits"]
    assert "Growth" in capsys.readouterr().out
