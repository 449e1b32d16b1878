"""After an error in the middle of a step, on all devices alike, the next step is right."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed_errors import ERRORS, ddp_is_wrapped_anew, next_step_is_right
from in_processes import in_processes


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("root", marks=pytest.mark.slow)])
def test_one_process(engine: str, one_process: None) -> None:
    next_step_is_right(0, engine, 2, list(ERRORS))


@pytest.mark.slow
def test_without_a_reset_of_pytorch(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 FSDP2 has none."""
    state = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
    monkeypatch.delattr(f"{state}._reset_iter_state", raising=False)
    next_step_is_right(0, "fsdp2", 2, list(ERRORS))


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("engine", ["fsdp2", "root"])
def test_two_processes(engine: str, batches: int, tmp_path: Path) -> None:
    in_processes(tmp_path, 2, next_step_is_right, engine, batches, list(ERRORS))


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    in_processes(tmp_path, 2, ddp_is_wrapped_anew)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize(("how", "words"), [("raises", "on purpose"), ("killed", "SIGKILL")])
def test_a_device_that_dies(engine: str, how: str, words: str, tmp_path: Path) -> None:
    """`torchrun` ends the others, and its report names the one that died; nothing waits for a timeout."""
    script = Path(__file__).parent / "distributed_errors.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    began = time.monotonic()
    found = subprocess.run([*run, str(script), engine, how], capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - began
    assert found.returncode != 0
    report = found.stderr[found.stderr.index("Root Cause") :]
    assert "rank      : 1 " in report and words in report, report
    died = [float(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("dies at")]
    assert len(died) == 1 and "went through" not in found.stdout
    assert seconds - (died[0] - began) < 60  # the timeout of the group is ten minutes
