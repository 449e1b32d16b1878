"""The page of a schedule: self-contained, and with the numbers of the Python API."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import build

import streambp_fx
from streambp_fx.cost import eager_step
from streambp_fx.cost.held_bytes import CAUSES
from streambp_fx.passes.graph.facts import Reach
from streambp_fx.show import whole_files
from streambp_fx.show.page import embedded
from streambp_fx.show.page.chart import name_of
from streambp_fx.show.page.dependencies import Dependence
from streambp_fx.show.page.programs import functions, highlighted
from streambp_fx.show.step_memory import StepMemory, thinned
from streambp_fx.units import readable

TITLE = 'a "model" <script>alert(1)</script> & co'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "input", "br", "path", "rect"}


class Flip(torch.nn.Module):
    """A layer whose rows read later rows by an op that cannot be chunked."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flip(1)  # mixes <rows> & more


class Page(HTMLParser):
    """What a page says: its elements with their attributes and text; tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any], list[str]]] = []
        self.open: list[tuple[str, dict[str, Any], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()[0], f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def find(self, tag: str, **attributes: str) -> Iterator[tuple[dict[str, Any], str]]:
        wanted = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()}
        for name, found, text in self.elements:
            if name == tag and all(found.get(k) == v for k, v in wanted.items()):
                yield found, "".join(text)

    def one(self, tag: str, **attributes: str) -> tuple[dict[str, Any], str]:
        (found,) = self.find(tag, **attributes)
        return found


@dataclass
class Made:
    schedule: streambp_fx.Schedule
    path: Path
    text: str
    page: Page
    data: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A layer that reads all rows up to its own, then one that reads a window, with an op that is refused."""
    torch._dynamo.reset()
    model = build("qwen2_sliding")
    model.model.layers[1].mlp = Flip(model.model.layers[1].mlp)
    with pytest.warns(streambp_fx.StreamBPWarning):
        schedule = streambp_fx.explain(model, seq_len=301, chunk=32, loss_chunk=16)
    path = tmp_path_factory.mktemp("page") / "schedule.html"
    schedule.to_html(path, TITLE)
    text = path.read_text()
    page = Page(text)
    data = json.loads(page.one("script", id="data")[1])
    return Made(schedule, path, text, page, data)


@pytest.mark.slow
def test_it_needs_nothing_else(made: Made) -> None:
    addresses = [v for _, a, _ in made.page.elements for k, v in a.items() if k in ("src", "href", "action")]
    assert addresses and all(a.startswith("#") or a == "data:," for a in addresses)
    assert not re.search(r"https?://|@import|url\(", made.text)
    policy = made.page.one("meta", http_equiv="Content-Security-Policy")[0]["content"]
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy
    identifiers = [a["id"] for _, a, _ in made.page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    assert {a[1:] for a in addresses if a.startswith("#")} <= set(identifiers)
    assert "lane" not in identifiers, "there is one device"


def test_what_is_not_ours_is_escaped(made: Made) -> None:
    assert "alert(1)" in made.text and "<script>alert" not in made.text
    assert made.page.one("h1")[1] == f"Schedule of {TITLE}"
    assert "</script>" not in embedded({"name": "</script><b>"})


def test_peaks_are_those_of_the_cost_model(made: Made) -> None:
    schedule, cost = made.schedule, StepMemory.of(made.schedule).cost
    sizes = cost.sizes(301)
    shown = {
        way: (int(attributes["data-bytes"]), text)
        for way in ("streamed", "checkpointing", "eager", "stored")
        for attributes, text in made.page.find("b", data_figure=way)
    }
    expected = {"streamed": cost.peak(sizes).total, "stored": 301 * schedule.stored_bytes_per_row()}
    for way, checkpointing in (("checkpointing", True), ("eager", False)):
        expected[way] = max(m.total for m in eager_step.timeline(cost, sizes, checkpointing))
    assert shown == {way: (count, readable(count)) for way, count in expected.items()}
    by_cause = {a["data-cause"]: int(a["data-bytes"]) for a, _ in made.page.find("td") if "data-cause" in a}
    peak = cost.peak(sizes)
    assert {c: b for c, b in by_cause.items() if b} == {c: b for c, b in peak.bytes.items() if b}
    assert str(cost.peak_expression()) in made.page.one("pre", class_="wrap")[1]


def test_the_timeline_holds_moments_of_the_step(made: Made) -> None:
    """Each one that is drawn is one of the step, in its order, and the peak is among them."""
    cost = StepMemory.of(made.schedule).cost
    timeline = cost.timeline(cost.sizes(301))
    step = [
        (m.phase, m.segment, m.chunk, m.program, {c: b for c, b in m.bytes.items() if b}) for m in timeline
    ]
    data, at = made.data, 0
    assert data["start"] == sorted(data["start"]) and 0 == data["start"][0] < data["start"][-1] < 1
    for k in range(len(data["start"])):
        by_cause = {c: b for c, b in zip(data["causes"], data["bytes"][k], strict=True) if b}
        drawn = (*(data[n][k] for n in ("phase", "segment", "chunk", "program")), by_cause)
        at = step.index(drawn, at) + 1
    assert max(map(sum, data["bytes"])) == max(m.total for m in timeline)


def test_each_cause_has_a_colour_of_its_own() -> None:
    style = resources.files("streambp_fx.show.page").joinpath("page.css").read_text()
    colours = dict(re.findall(r"\.(cause-[a-z-]+) { --cause: (#[0-9a-f]{6}); }", style))
    assert set(colours) == {name_of(c) for c in CAUSES} and len(set(colours.values())) == len(CAUSES)


def test_the_slider_begins_at_the_peak(made: Made) -> None:
    found = re.search(r'id="moment" min="0" max="(\d+)" value="(\d+)" data-moment="(\d+)"', made.text)
    assert found is not None
    last, place, moment = map(int, found.groups())
    totals, starts = [sum(b) for b in made.data["bytes"]], [*made.data["start"], 1.0]
    assert totals[moment] == max(totals)
    assert starts[moment] <= place / last <= starts[moment + 1]


def test_segments_show_what_the_schedule_says(made: Made) -> None:
    schedule, page = made.schedule, made.page
    assert [s.chunked for s in schedule.segments] == [True, True, True, False, True]
    chunks = [int(a["data-count"]) for a, _ in page.find("dd", data_figure="chunks")]
    state = [int(a["data-bytes"]) for a, _ in page.find("dd", data_figure="state")]
    assert chunks == [schedule.chunks(s) for s in schedule.segments]
    assert state == [schedule.state_bytes_per_row(s) for s in schedule.segments] and any(state)
    for segment in schedule.segments:
        assert page.one("details", id=f"segment-{segment.index}")


def test_which_rows_each_value_reads(made: Made) -> None:
    rows = {a["data-value"]: a for a, _ in made.page.find("tr") if "data-value" in a}
    for segment in made.schedule.segments:
        assert [n.name in rows for n in segment.nodes] == [True] * len(segment.nodes)
    _, full, window, refused, head = made.schedule.segments
    attention = {s.index: s.mixings[0].node.name for s in (full, window)}
    assert rows[attention[1]]["data-reach"] == "CAUSAL"
    assert (rows[attention[2]]["data-reach"], rows[attention[2]]["data-window"]) == ("WINDOW", "16")
    assert rows[full.nodes[0].name]["data-reach"] == rows[head.nodes[0].name]["data-reach"] == "ROW"
    assert refused.refused.name == "flip" and rows["flip"]["data-reach"] == "FULL"


def test_dependences_compose() -> None:
    row, window, causal = Dependence(Reach.ROW), Dependence(Reach.WINDOW, 4), Dependence(Reach.CAUSAL)
    assert row.through(Reach.WINDOW, 4) == window and window.through(Reach.WINDOW, 3).window == 6
    assert (window | Dependence(Reach.WINDOW, 7)).window == 7 and (window | row) == window
    assert window.through(Reach.CAUSAL, None).reach is causal.through(Reach.WINDOW, 4).reach is Reach.CAUSAL
    assert Dependence().through(Reach.FULL, None).reach is Reach.CONST


def test_what_was_not_chunked(made: Made) -> None:
    refused = made.schedule.segments[3]
    rows = list(made.page.find("tr", data_refused="true"))
    assert len(rows) == 1 and refused.reason in rows[0][1] and "aten.flip" in rows[0][1]
    assert re.search(r"test_page\.py:\d+: return self\.inner\(x\)\.flip\(1\)", rows[0][1])
    whole = [text for _, text in made.page.find("tr", data_refused="false")]
    assert len(whole) == 1 and "aten.embedding" in whole[0]


def test_the_programs_are_those_of_code(made: Made) -> None:
    shown = [text for a, text in made.page.find("pre") if "class" not in a]
    printed = [f.text for f in functions(made.schedule.code())]
    assert sorted(shown) == sorted(printed) and any(t.startswith("def step(") for t in shown)


def test_the_instructions_of_the_step(made: Made) -> None:
    (shown,) = (text for a, text in made.page.find("pre") if a.get("class") == "instructions")
    assert shown == str(made.schedule.program) and "call backward of segment" in shown


def test_highlighting_keeps_the_text() -> None:
    code = 'def f(x):\n    """A < b & c."""\n    return "#1" if x else None  # no <b>\n'
    marked = highlighted(code)
    assert '<span class="c"># no &lt;b&gt;</span>' in marked and '<span class="k">return</span>' in marked
    assert "".join(Page(f"<pre>{marked}</pre>").one("pre")[1]) == code


def test_a_thinned_timeline_keeps_peaks() -> None:
    totals = [((k * 7919) % 1009) for k in range(5000)]
    totals[1234], totals[4321] = 10**6, -1
    kept = thinned([k / 5000 for k in range(5000)], totals, 100)
    assert {1234, 4321} <= set(kept) and len(kept) <= 200 and kept == sorted(kept)
    for column in range(100):
        own = [k for k in kept if k // 50 == column]
        assert max(totals[k] for k in own) == max(totals[50 * column : 50 * column + 50])


def test_bytes_for_people() -> None:
    counts = (0, 1023, 1024, 77056, 5 * 2**20, 2**30, 3000 * 2**30)
    assert [readable(c) for c in counts] == [
        *("0 B", "1023 B", "1.0 KiB", "75.3 KiB", "5.0 MiB", "1.00 GiB", "3,000.00 GiB")
    ]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    whole_files.write_whole(path, b"one")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(streambp_fx.OutputError, match="no space left"):
        whole_files.write_whole(path, b"two")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


# ---- in a browser


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_in_a_browser(made: Made) -> None:
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[pages]'")
    said, asked = [], []
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(made.path.as_uri())
        assert page.title() == f"Schedule of {TITLE}"
        _opens(page)
        _shows_moments(page, made.schedule)
        _fits_a_phone(page)
        _has_a_dark_side(page)
        _prints(page)
        browser.close()
    assert said == [] and asked == [made.path.as_uri()]


def _opens(page: Any) -> None:
    """Segments and programs open by mouse and by keyboard, and from the graph."""
    segment = page.locator("#segment-1")
    run, table = segment.locator(".reads summary").first, segment.locator("table.dependences").first
    assert not run.is_visible()
    page.locator("svg.graph a[href='#segment-1']").click()
    run.wait_for(state="visible")
    assert not table.is_visible()
    run.click()
    table.wait_for(state="visible")
    program = segment.locator("details.program").first
    program.locator("summary").focus()
    page.keyboard.press("Enter")
    assert "def segment_1_" in program.locator("pre").inner_text()
    segment.locator("summary").first.click()
    assert not run.is_visible() and not table.is_visible()


def _shows_moments(page: Any, schedule: streambp_fx.Schedule) -> None:
    """The tooltip, by pointer and by keyboard, against the timeline of the cost model."""
    timeline = StepMemory.of(schedule).streamed
    peak = max(timeline, key=lambda m: m.total)
    shown = page.locator("[data-figure=streamed]")
    assert int(shown.get_attribute("data-bytes")) == peak.total and shown.inner_text() == readable(peak.total)
    starts, totals = page.evaluate(
        "() => { const data = JSON.parse(document.getElementById('data').textContent);"
        " return [data.start, data.bytes.map(b => b.reduce((s, v) => s + v, 0))]; }"
    )
    top = totals.index(max(totals))
    canvas = page.locator("#canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (starts[top] + starts[top + 1]) / 2, box["y"] + 40)
    assert _tooltip(page) == {**{c: b for c, b in peak.bytes.items() if b}, "total": peak.total}
    page.locator("#moment").focus()
    page.keyboard.press("Home")
    first = timeline[0]
    assert _tooltip(page) == {**{c: b for c, b in first.bytes.items() if b}, "total": first.total}
    page.keyboard.press("ArrowRight")
    assert page.locator("#tooltip").get_attribute("data-moment") == "1"
    slider, cursor = page.locator("#moment"), page.locator("#cursor")
    for key in ("PageUp", "ArrowLeft", "End"):  # the slider stands below the moment that it shows
        page.keyboard.press(key)
        centre = cursor.bounding_box()["x"]
        track = slider.bounding_box()
        share = int(slider.input_value()) / int(slider.get_attribute("max"))
        thumb = track["x"] + 8 + (track["width"] - 16) * share
        assert abs(thumb - centre) < 3, key
    assert page.locator("#tooltip").get_attribute("data-moment") == str(len(starts) - 1)
    page.keyboard.press("Escape")
    assert not page.locator("#tooltip").is_visible()


def _tooltip(page: Any) -> dict[str, int]:
    assert page.locator("#tooltip").is_visible()
    found = {}
    for cell in page.locator("#tooltip td[data-bytes]").all():
        count = int(cell.get_attribute("data-bytes"))
        assert cell.inner_text() == readable(count)
        found[cell.get_attribute("data-cause")] = count
    return found


def _fits_a_phone(page: Any) -> None:
    """No sideways scrolling of the page, with everything open."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == page.evaluate("document.documentElement.clientWidth") == 390
    cells = page.evaluate(
        "[...document.querySelectorAll('#unchunked td')].map(c => c.getBoundingClientRect().right)"
    )
    assert cells and max(cells) <= 390, "the table of what is not chunked is not cut off"
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = false; })")


def _has_a_dark_side(page: Any) -> None:
    colors = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(255, 255, 255)", "rgb(15, 19, 24)"]


def _prints(page: Any) -> None:
    """Segments are open on paper, and closed again afterwards."""
    assert page.locator("details[open]").count() == 0
    page.evaluate(
        "addEventListener('beforeprint',"
        " () => { window.printed = document.querySelectorAll('details[open]').length; })"
    )
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("window.printed") == 5 and page.locator("details[open]").count() == 0
    page.emulate_media(media="print")
    assert not page.locator("#moment").is_visible()


@pytest.mark.slow
def test_what_is_kept_by_value_and_segment(tmp_path: Path) -> None:
    """A budget has some values kept of some rows: the table's shares are those of the schedule."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model = build("llama", dtype=torch.float32, **sizes)
    streambp_fx.transform(model, chunk=32, loss_chunk=32, memory="1600KiB", check="never")
    ids = torch.randint(0, 97, (1, 512))
    model(input_ids=ids, labels=ids).loss.backward()
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    schedule = schedule.for_length(512)
    shares = {share for s in schedule.segments for _, share in s.kept.values()}
    assert 1 in shares and any(0 < share < 1 for share in shares), "else the budget says nothing"
    schedule.to_html(tmp_path / "kept.html")
    page = Page((tmp_path / "kept.html").read_text())
    cells = [e for e in page.elements if e[0] == "td" and "kept" in e[1].get("class", "")]
    shown = [f"{float(e[1]['data-share']):.3f}" for e in cells if e[1]["data-share"] != "0"]
    assert set(shown) == {f"{float(share):.3f}" for share in shares}
    totals = [int(e[1]["data-bytes"]) for e in page.elements if e[0] == "td" and "data-bytes" in e[1]]
    want = [sum(int(n * share * 512) for n, share in s.kept.values()) for s in schedule.segments if s.kept]
    assert set(want) <= set(totals)
