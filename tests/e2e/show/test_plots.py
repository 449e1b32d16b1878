"""The picture of a schedule's memory, and the command line that draws it and writes the page."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import build, plain

import streambp_fx
from streambp_fx.cli import main
from streambp_fx.cost import eager_step
from streambp_fx.cost.held_bytes import TOKENS
from streambp_fx.show import memory_plot
from streambp_fx.show.step_memory import WAYS, StepMemory
from streambp_fx.units import readable

TINY = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def schedule() -> streambp_fx.Schedule:
    torch._dynamo.reset()
    return streambp_fx.explain(build("llama"), seq_len=200, batch_size=2, chunk=32, loss_chunk=16)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.slow
def test_the_picture(schedule: streambp_fx.Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines reach the peaks of the cost model, over time and at the length of the schedule."""
    figure_module = pytest.importorskip("matplotlib.figure", reason="needs matplotlib: pip install '.[plot]'")
    drawn: list[Any] = []
    honest = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), honest(self, *a, **k))
    )
    schedule.plot_memory(tmp_path / "memory.png", title="$a_model$")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules, "no display, no global state"
    over_time, by_length = drawn[0].axes
    cost = StepMemory.of(schedule).cost
    sizes = cost.sizes(200)
    timelines = [eager_step.timeline(cost, sizes, c) for c in (False, True)] + [cost.timeline(sizes)]
    peaks = [max(m.total for m in t) for t in timelines]
    lines = over_time.get_lines()[:3]
    assert [max(line.get_ydata()) for line in lines] == peaks
    assert all(line.get_xdata()[0] == 0 and line.get_xdata()[-1] == 1 for line in lines)
    at_length = [dict(zip(*line.get_data(), strict=True))[200] for line in by_length.get_lines()[:3]]
    assert at_length == pytest.approx(peaks, rel=0.05), "the expressions take the last chunk for all"
    words = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert all(readable(p) in word for p, word in zip(peaks, words, strict=True))


@pytest.mark.slow
def test_parts_of_the_step_follow_each_other(schedule: streambp_fx.Schedule) -> None:
    memory = StepMemory.of(schedule)
    assert StepMemory.of(schedule) is memory, "made once"
    slots = list(memory.slots.items())
    assert slots[0][0] == ("forward", 0) and slots[-1][0] == ("backward", 0)
    assert slots[0][1][0] == 0 and slots[-1][1][1] == pytest.approx(1)
    for (_, (start, end)), (_, (following, _)) in pairwise(slots):
        assert start < end == following
    for way in WAYS:
        starts = memory.starts(way)
        assert starts == sorted(starts) and len(starts) == len(getattr(memory, way))
    peaks = [memory.peak_by_length(way)(200) for way in ("eager", "checkpointing")]
    assert peaks == [memory.peak("eager"), memory.peak("checkpointing")]
    assert TOKENS in memory.peak_expression("streamed").free_symbols


def test_a_chunk_that_goes_through_all_layers_is_one_part() -> None:
    schedule = streambp_fx.explain(
        build("llama"), seq_len=100, batch_size=2, chunk=32, loss_chunk=16, order="chunks"
    )
    memory = StepMemory.of(schedule)
    together = [s.index for s in schedule.segments_together[0]]
    assert len(together) > 2 and not {("forward", k) for k in together[1:]}.intersection(memory.slots)
    for way in WAYS:
        assert (starts := memory.starts(way)) == sorted(starts)


@pytest.mark.slow
def test_another_length_has_its_own_memory(schedule: streambp_fx.Schedule) -> None:
    longer = StepMemory.of(schedule.for_length(400))
    assert longer.sizes.tokens == 400 and StepMemory.of(schedule).sizes.tokens == 200
    assert longer.peak("eager") > 1.9 * StepMemory.of(schedule).peak("eager")


def test_without_matplotlib(
    schedule: streambp_fx.Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(streambp_fx.OutputError, match="pip install matplotlib"):
        schedule.plot_memory(tmp_path / "memory.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_teacher_without_gradient(tmp_path: Path) -> None:
    """Of a step that ran: for its length. Eagerly the teacher leaves nothing, and is not differentiated."""
    torch._dynamo.reset()
    student, teacher = (build("llama", num_hidden_layers=1) for _ in range(2))
    ids = plain(2, 61)["input_ids"]

    @torch.compile(backend="streambp", options={"chunk": 16, "loss_chunk": 8})
    def distill(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits
        found = student(input_ids=ids).logits
        rows = (torch.nn.functional.log_softmax(v, -1) for v in (found, wanted))
        return torch.nn.functional.kl_div(*rows, log_target=True, reduction="batchmean")

    distill(ids).backward()
    schedule = streambp_fx.schedule(student)
    memory = StepMemory.of(schedule)
    assert memory.sizes.tokens == 61 and len(schedule.segments) == 5
    for way in WAYS:
        backward = {m.segment for m in getattr(memory, way) if m.phase == "backward"}
        assert not backward & {0, 1} and 3 in backward, f"segments 0 and 1 are the teacher's ({way})"
        assert {m.segment for m in getattr(memory, way) if m.phase == "forward"} == set(range(5))
    schedule.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Schedule of a training step</h1>" in text and "61 tokens" in text
    layers, head = (f">{readable(2 * 32 * size)} a row</text>" for size in (8, 4))
    assert text.count(layers) == 2, "into the layer of each model"
    assert text.count(head) == 2, "and to the head from both, in float32, past the boxes between"


def test_a_graph_that_runs_unstreamed() -> None:
    facts = type("Facts", (), {"segments": []})()
    nothing = streambp_fx.Schedule(facts, streambp_fx.Options())
    with pytest.raises(ValueError, match="runs unstreamed"):
        StepMemory.of(nothing)


@pytest.mark.slow
def test_the_command_line(
    capsys: pytest.CaptureFixture[str],
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: streambp_fx.Schedule,
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    asked: list[Any] = []
    module = "streambp_fx.commands.explain.explain"
    monkeypatch.setattr(module, lambda model, *a, **k: asked.append((type(model).__name__, a, k)) or schedule)
    page, picture = tmp_path / "page.html", tmp_path / "memory.svg"
    sizes = [
        "--seq-len",
        "200",
        "--batch-size",
        "2",
        "--chunk",
        "32",
        "--loss-chunk",
        "16",
        "--dtype",
        "float32",
    ]
    assert main(["explain", config, *sizes, "--html", str(page), "--plot", str(picture), "--dot"]) == 0
    shown = capsys.readouterr().out
    policy = {"save": "inputs", "every": 1, "offload": "none", "order": "layers", "offload_rows": False}
    assert asked == [("LlamaForCausalLM", (200, 2), {"chunk": 32, "loss_chunk": 16, **policy})]
    assert f"wrote {page}\nwrote {picture}\ndigraph" in shown and "Schedule of" not in shown
    text = page.read_text()
    assert "Schedule of tiny.json, float32, 2 x 200 tokens" in text and "segments 1-2 (2 times)" in text
    assert "<svg" in picture.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory.svg", "page.html", "tiny.json"]


def test_the_command_line_prints_the_schedule(
    capsys: pytest.CaptureFixture[str],
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    schedule: streambp_fx.Schedule,
) -> None:
    monkeypatch.setattr("streambp_fx.commands.explain.explain", lambda *_, **__: schedule)
    assert main(["explain", config, "--seq-len", "200"]) == 0
    assert capsys.readouterr().out == f"{schedule}\n"


def test_the_command_line_explains_a_model(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert main(["explain", config, "--seq-len", "100", "--chunk", "30", "--dot"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("digraph") and "segment 3: rows" in shown


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["nothing-here", "--seq-len", "9"], "no such file or directory"),
        (["CONFIG", "--seq-len", "9", "--dtype", "int8"], "dtype must be one of"),
        (["CONFIG", "--seq-len", "9", "--html", "no/folder.html"], "there is no folder no"),
        (["CONFIG", "--seq-len", "9", "--html", "."], "it is a folder"),
        (["CONFIG", "--seq-len", "9", "--plot", "memory.bmp"], "must end in .png, .svg, .pdf"),
    ],
)
def test_bad_input_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str],
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: list[str],
    said: str,
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(memory_plot, "figure_class", lambda: None)
    monkeypatch.setattr("streambp_fx.commands.explain.explain", lambda *_, **__: pytest.fail("it worked"))
    assert main(["explain", *(config if w == "CONFIG" else w for w in wrong)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "required: --seq-len"),
        (["--seq-len", "1"], "at least 2"),
        (["--seq-len", "9", "--chunk", "0"], "1"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], wrong: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", "m", *wrong])
    assert exit_.value.code == 2 and said in capsys.readouterr().err
