"""Static tools see `passes/` as `streambp_fx.passes`, so that nothing that comes from there is `Any`."""

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
from streambp_fx.passes.step.instructions import Procedure

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


def test_what_comes_from_passes_has_its_type(revealed):
    assert revealed[: len(REVEALED)] == REVEALED
    assert len(revealed) == PROBE.count("reveal_type(") and "Any" not in revealed


def test_the_link_leads_to_passes():
    """It is a relative link, which git keeps: a copy of the folder could be out of date."""
    assert LINK.is_symlink() and LINK.resolve() == ROOT / "passes"
    assert LINK.readlink() == Path("../passes")
