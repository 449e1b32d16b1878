"""The scripts of the guide run, and show what the guide says that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "context_parallel"])
def test_two_processes(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, EXAMPLES / "distributed" / f"{name}.py"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(done.stdout)) == 3 and "Warning: " not in done.stdout


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (-?\d+\.\d+)", output)]


@pytest.mark.slow
def test_fine_tune() -> None:
    output = run("fine_tune.py")
    assert losses(output)[-1] < 0.8 * losses(output)[0]
    streamed, unstreamed = map(float, re.findall(r"([\d.]+) MiB", output))
    assert streamed < unstreamed / 4
    assert float(re.findall(r"gradient: (\S+)", output)[0]) < 1e-3


@pytest.mark.slow
def test_torch_compile() -> None:
    output = run("torch_compile.py")
    assert losses(output)[-1] < 0.95 * losses(output)[0]
    assert "logits: LazyTensor (1, 100, 2048)" in output
    assert re.search(r"generated: \[\d+(, \d+){3}\]", output)


@pytest.mark.slow
def test_own_objective() -> None:
    output = run("own_objective.py")
    assert abs(losses(output)[0] - 0.6931) < 1e-3, "before training both answers are as likely as before"
    assert losses(output)[-1] < 0.3
    assert "2 sweeps over the loss head" in output
    streamed, unstreamed = peaks(output)
    assert streamed < unstreamed / 4


def peaks(output: str) -> tuple[float, float]:
    """Of the streamed step and of the unstreamed one, in MiB."""
    streamed, unstreamed = map(float, re.findall(r"([\d.]+) MiB", output))
    return streamed, unstreamed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "grpo", "ppo", "distillation"])
def test_objective(name: str) -> None:
    output = run(f"{name}.py")
    assert len(losses(output)) >= 3 and (name == "grpo" or losses(output)[-1] < losses(output)[0])
    streamed, unstreamed = peaks(output)
    assert streamed < unstreamed / 4


@pytest.mark.slow
def test_trainer() -> None:
    output = run("trainer.py")
    assert len(losses(output)) == 5 and losses(output)[-1] < 0.95 * losses(output)[0]
    assert len(re.findall(r"peak of activations [\d.]+ MiB", output)) == 5


@pytest.mark.slow
def test_inspect_schedule() -> None:
    output = run("inspect_schedule.py")
    assert "a window of 4096 rows" in output
    assert "runs unchunked: a reduction over the sequence axis" in output
    assert "StreamBPWarning: 1 of 4 segments run unchunked" in output
    check_explained(output.split("\n\n")[0].splitlines())


def check_explained(schedule: list[str]) -> None:
    """Every column and every line below the table has its paragraph in the page on schedules."""
    page = (EXAMPLES.parent / "docs" / "reading_a_schedule.md").read_text()
    table = r"  \d+(-\d+)? +(layer|rows|unchunked) "
    below = [line for line in schedule[2:] if not re.match(table, line) and not line.startswith("    ")]
    assert len(below) >= 2
    terms = [*schedule[1].split(), *(line.strip().split(":")[0] for line in below)]
    missing = [term for term in terms if f"\n`{term}`\n: " not in page]
    assert not missing, f"{missing}: not explained in docs/reading_a_schedule.md"


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    tested |= {"sft.py", "grpo.py", "ppo.py", "distillation.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested
