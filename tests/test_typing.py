"""Static tools see `passes/` as `streambp_fx.passes`, so that nothing that comes from there is `Any`."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = ROOT / "streambp_fx" / "passes"

PROBE = """
from streambp_fx.options import Options
from streambp_fx.passes.graph.facts import Facts, Segment
from streambp_fx.passes.s3_cut.policy import candidates
from streambp_fx.passes.rules import Rule
from streambp_fx.passes.step.procedure import Procedure

def probe(facts: Facts, segment: Segment, procedure: Procedure, rule: Rule) -> None:
    reveal_type(facts.segments)
    reveal_type(segment.mixings[0])
    reveal_type(procedure)
    reveal_type(Options().stored)
    reveal_type(candidates)
    reveal_type(rule)
"""
REVEALED = [
    "list[streambp_fx.passes.graph.facts.Segment]",
    "streambp_fx.passes.graph.facts.Mixing",
    "streambp_fx.passes.step.instructions.Procedure",
    "streambp_fx.passes.s3_cut.policy.Policy",
]


@pytest.fixture(scope="module")
def revealed(tmp_path_factory):
    """What mypy, set as for `make check`, prints for each `reveal_type`."""
    pytest.importorskip("mypy")
    probe = tmp_path_factory.mktemp("typing") / "probe.py"
    probe.write_text(PROBE)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(probe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("Revealed type is ")[1].strip('"') for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_what_comes_from_passes_has_its_type(revealed):
    assert revealed[: len(REVEALED)] == REVEALED
    assert len(revealed) == PROBE.count("reveal_type(") and "Any" not in revealed


USER = """
import torch
from torch import nn

import streambp_fx
from streambp_fx import Options, Plan, Schedule, Status, StreamBPError, StreamBPWarning, Trace, Verification
from streambp_fx.integrations import StreamBPCallback


def train(model: nn.Module, ids: torch.Tensor) -> int:
    streamed: nn.Module = streambp_fx.transform(model, chunk=2000, memory="8GiB")
    streamed(input_ids=ids, labels=ids).loss.backward()
    found: Status = streambp_fx.status(streamed)
    schedule: Schedule | None = streambp_fx.schedule(streamed)
    if schedule is not None:
        schedule.to_html("schedule.html")
    streambp_fx.restore(streamed)
    plan: Plan = streambp_fx.plan("Qwen3-8B", memory="80GiB")
    checked: Verification = streambp_fx.verify(model, {"input_ids": ids, "labels": ids})
    trace: Trace = streambp_fx.trace(model, {"input_ids": ids, "labels": ids})
    text: str = streambp_fx.diff(str(trace), str(streambp_fx.explain(model, 64)))
    options: Options = Options(chunk=3)
    errors: tuple[type[StreamBPError], ...] = (streambp_fx.CaptureError, streambp_fx.OffloadError)
    print(checked.ok, text, options, errors, StreamBPWarning, StreamBPCallback(chunk=5))
    return found.streamed_steps + plan.seq_len
"""


@pytest.mark.slow
def test_a_script_of_a_user_is_strictly_typed(tmp_path: Path) -> None:
    """As mypy sees the package when it is installed: what is within it is not the user's to mend."""
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(USER)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import streambp_fx\n\nstreambp_fx.transform(3)\nstreambp_fx.plan(memory=[])\n")
    options = [
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    run = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    done = run([sys.executable, "-m", "mypy", *options, str(script)])
    assert done.returncode == 0, done.stdout + done.stderr
    done = run([sys.executable, "-m", "mypy", *options, str(wrong)])
    assert done.stdout.count(": error:") == 3 and "[arg-type]" in done.stdout, done.stdout


def test_the_link_leads_to_passes():
    """It is a relative link, which git keeps: a copy of the folder could be out of date."""
    assert LINK.is_symlink() and LINK.resolve() == ROOT / "passes"
    assert LINK.readlink() == Path("../passes")
