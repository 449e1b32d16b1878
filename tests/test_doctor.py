"""`streambp-fx doctor`: a line for each thing, and an exit status that says whether something is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from streambp_fx.cli import main
from streambp_fx.commands import doctor
from streambp_fx.commands.doctor import Finding, disk, findings
from streambp_fx.planning import place_rates


def test_every_line_has_a_mark_and_every_thing_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4] in ("ok  ", "--  ") for line in lines), lines
    for word in ("streambp-fx", "Python", "PyTorch", "transformers", "device", "attention kernels", "fla"):
        assert any(word in line for line in lines), word
    for word in ('body="inductor"', 'offload="host"', 'offload="disk"', "peft", "trl", "matplotlib"):
        assert any(word in line for line in lines), word


def test_the_self_test_is_a_step() -> None:
    found = doctor.tried()
    assert found.mark == "ok" and "loss and gradients of eager" in found.text


def test_what_is_broken_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = disk(tmp_path / "nowhere")
    assert broken.mark == "NO" and "nowhere" in broken.text
    monkeypatch.setattr(doctor, "disk", lambda folder: broken)
    assert main(["doctor", "--no-self-test"]) == 1
    assert Finding("NO", broken.text) in list(findings(self_test=False))


def test_the_speed_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_rates, "SAMPLE", 4 * 2**20)
    found = disk(tmp_path)
    assert found.mark == "ok" and "GB/s" in found.text and not list(tmp_path.iterdir())
