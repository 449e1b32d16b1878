"""Several devices in what is shown of a schedule: the text, the page's lane, the plot."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import build

import streambp_fx
from streambp_fx.passes.s6_schedule.collectives import CollectiveKind, collectives_of
from streambp_fx.show import memory_plot
from streambp_fx.show.communication import bars
from streambp_fx.show.step_memory import StepMemory

LAYERS = 3
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def schedule() -> streambp_fx.Schedule:
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=LAYERS)
    return streambp_fx.explain(model, 300, chunk=64, loss_chunk=32, gpus=4, shard="fsdp2")


@pytest.fixture(scope="module")
def page(schedule: streambp_fx.Schedule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "schedule.html"
    schedule.to_html(path, "four devices")
    return path


def test_text(schedule: streambp_fx.Schedule) -> None:
    text = str(schedule)
    assert "collectives between 4 devices, in order; each sends" in text
    found = [
        line.split(": ")[-1] for line in text.splitlines() if "all-gather" in line or "reduce-scatter" in line
    ]
    assert found == [
        "before the forward",
        "forward, before segments 1 to 3",
        "backward, before segments 3 to 1",
        "backward, after segments 3 to 1",
        "after the backward",
    ]
    assert "model.layers.0 to 2: forward" in text and "3 times these 2:" in text
    assert all(len(line) < 110 for line in text.splitlines())
    instructions = str(schedule.program)
    assert instructions.count("around the call of the model") == 2
    assert "sum over the devices the gradients of group" in instructions


def test_the_lane_has_every_collective_in_its_place(schedule: streambp_fx.Schedule, page: Path) -> None:
    text, program = page.read_text(), schedule.program.instructions
    rects = re.findall(
        r'<rect class="(gathers|sums)" x="([\d.]+)"[^>]*data-bytes="(\d+)" data-count="(\d+)"', text
    )
    wanted = [c for i in program.instructions() for c in collectives_of(program, i)]
    for way, own in (("gathers", True), ("sums", False)):
        sizes = [c.bytes for c in wanted if (c.kind is CollectiveKind.ALL_GATHER) is own]
        shown = [r for r in rects if r[0] == way]
        assert sum(int(r[3]) for r in shown) == len(sizes) and sum(int(r[2]) for r in shown) == sum(sizes)
        places = [float(r[1]) for r in shown]
        assert places == sorted(places) and places[0] >= 0 and places[-1] < 1000
    lines = re.search(r'<pre class="collectives"[^>]*><code>(.*?)</code>', text, re.S)
    assert lines is not None and unescape(lines[1]).splitlines()[0] in str(schedule)


def test_gathers_stand_before_what_reads_them(schedule: streambp_fx.Schedule) -> None:
    memory = StepMemory.of(schedule)
    for bar in bars(memory):
        for collective in bar.collectives:
            if collective.name.startswith("model.layers."):
                segment = int(collective.name.rsplit(".", 1)[1]) + 1
                edges = [memory.slots[phase, segment] for phase in ("forward", "backward")]
                place = 0 if bar.gathers else 1
                assert any(bar.start == pytest.approx(edge[place], abs=2e-4) for edge in edges)


def test_the_plot_has_a_panel_for_it(
    schedule: streambp_fx.Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    real = memory_plot._draw_communication

    def draw(*given: Any) -> None:
        drawn.append(given)
        real(*given)

    monkeypatch.setattr(memory_plot, "_draw_communication", draw)
    schedule.plot_memory(tmp_path / "memory.svg")
    ((axes, found),) = drawn
    heights = [patch.get_height() for patch in axes.patches]
    assert sorted(heights) == sorted(bar.bytes if bar.gathers else -bar.bytes for bar in found)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_in_a_browser(page: Path) -> None:
    """On a phone the lane is as wide as the timeline over it, and nothing runs over the edge."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[pages]'")
    said: list[str] = []
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        view = browser.new_page()
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.goto(page.as_uri())
        for width in (1200, 390):
            view.set_viewport_size({"width": width, "height": 844})
            lane, canvas = (view.locator(s).bounding_box() for s in ("#lane svg", "#canvas"))
            assert lane["x"] == pytest.approx(canvas["x"], abs=1)
            assert lane["width"] == pytest.approx(canvas["width"], abs=1)
            assert lane["y"] >= canvas["y"] + canvas["height"] and lane["height"] > 50
            view.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert view.evaluate("document.documentElement.scrollWidth") == width
            view.evaluate("document.querySelectorAll('details').forEach(d => { d.open = false; })")
        browser.close()
    assert said == []
