"""The picture of a step's memory: what is drawn is what was held, and it can be read on any ground."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import step_picture
from benchmarks.step_picture import MIB, course, draw, thinned


def test_of_each_stretch_the_most() -> None:
    moments = [(0.0, 0), (0.5, 7 * MIB), (0.6, 3 * MIB), (1.9, 2 * MIB), (2.0, 0)]
    assert thinned(moments, 2) == [(0.25, 7.0), (0.75, 2.0)]


@pytest.mark.slow
def test_a_streamed_step_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 4000, "num_attention_heads": 2}
    small = {**step_picture.CONFIGS["qwen3"], **sizes, "num_key_value_heads": 1, "head_dim": 32}
    monkeypatch.setitem(step_picture.CONFIGS, "qwen3", small)
    peaks = {mode: max(held for _, held in course(mode, 700, 64)) for mode in step_picture.LABELS}
    assert peaks["streamed"] < peaks["checkpointing"] / 3 < peaks["eager"] / 3


def test_the_ground_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    courses = {mode: [(0.1, 1.0), (0.6, 5.0), (0.9, 2.0)] for mode in step_picture.LABELS}
    written = draw(courses, "a step", tmp_path / "step")
    assert [p.suffix for p in written] == [".png", ".svg"]
    assert "fill: #ffffff" not in (tmp_path / "step.svg").read_text()
