"""Pictures of a sweep show what was measured, and nothing else."""

import pytest

from benchmarks import plots
from benchmarks.cases import Workload
from benchmarks.measuring import Result
from benchmarks.modes import MODES

PEAKS, TIMES = "peak, GiB over weights and gradients", "seconds a step"


@pytest.mark.parametrize(
    ("peaks", "seconds", "panels"),
    [(True, True, [PEAKS, TIMES]), (True, False, [PEAKS]), (False, True, [TIMES]), (False, False, [])],
)
def test_a_sweep(tmp_path, monkeypatch, peaks, seconds, panels):
    figure_module = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install '.[plot]'")
    drawn = []
    honest = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), honest(self, *a, **k))
    )
    steps = [Workload("qwen3", tokens, 512) for tokens in (1024, 2048)]
    results = [
        Result(w, MODES[mode], w.tokens * 2**20 if peaks else None, [1e-3 * w.tokens] * seconds)
        for mode in ("checkpointing", "streamed")
        for w in steps
    ]
    written = plots.draw_sweep("tokens", results, lambda w: w.tokens, tmp_path / "sweep")
    assert [p.name for p in written] == (["sweep.png", "sweep.svg"] if panels else [])
    assert all(p.stat().st_size > 1000 for p in written)
    shown = drawn[0].axes if panels else []
    assert [axes.get_ylabel() for axes in shown] == panels
    for axes in shown:
        assert [line.get_label() for line in axes.get_lines()] == ["checkpointing", "streamed"]
        assert list(axes.get_lines()[0].get_ydata()) == (
            [1, 2] if axes.get_ylabel() == PEAKS else [1.024, 2.048]
        )
