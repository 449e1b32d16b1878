"""The pages fit the code: ops, messages, links, numbers; and the site builds without a warning."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

import streambp_fx

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [p for folder in (".", "decisions", "frameworks") for p in sorted((DOCS / folder).glob("*.md"))]


def text(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """The module that writes the tables; it needs nothing of the docs extra."""
    spec = importlib.util.spec_from_file_location("generated", DOCS / "_ext" / "generated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- tables and lists made from the code


def test_every_op_is_in_the_tables(generated: ModuleType) -> None:
    tables = generated.op_coverage()
    for _, registry in generated.registries().values():
        assert registry
        for op, _ in registry:
            assert f"`{generated.op_name(op).removeprefix('aten.')}`" in tables


def test_every_rule_says_what_it_does(generated: ModuleType) -> None:
    described = [generated.described(f) for _, rules in generated.registries().values() for _, f in rules]
    silent = {where for text, where in described if not text}
    assert not silent, "the first line of a rule's docstring is its entry in the table of ops"


def test_where_a_rule_is(generated: ModuleType) -> None:
    for _, registry in generated.registries().values():
        for _, function in registry:
            path, name = generated.described(function)[1].split(": ")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), (path, name)


def test_every_public_name_is_in_the_reference(generated: ModuleType) -> None:
    listed = set(re.findall(r":: streambp_fx\.(\w+)", generated.api()))
    assert listed == set(streambp_fx.__all__)
    assert {"transform", "Options", "Schedule", "CaptureError"} <= listed


# ---- what pages say of the code


def templates() -> list[str]:
    """All strings of the package, with an ellipsis for what is filled in."""
    found = []
    for path in [*(ROOT / "streambp_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(getattr(part, "value", "…")) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
    return [" ".join(template.split()) for template in found]


def test_messages_are_those_of_the_code() -> None:
    known = templates()
    messages = re.findall(r"^```text\n(.*?)^```", text("limits.md"), re.M | re.S)
    assert len(messages) > 15
    for message in messages:
        wanted = " ".join(message.split())
        pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in wanted.split("…")))
        assert any(pattern.search(template) for template in known), wanted


def test_the_worked_example_on_paper() -> None:
    """The table and the sums of the page, as fractions, and the program's own comparison with autograd."""
    page = text("how_it_works.md")
    x = [1, 2, 0, 1]
    rows = [
        [Fraction(2 ** (q * k), sum(2 ** (q * j) for j in x[: i + 1])) for k in x[: i + 1]]
        for i, q in enumerate(x)
    ]
    for key, line in enumerate(re.findall(r"^\| \$\\bar v_\d\$ \|(.*)\|$", page, re.M)):
        cells = [Fraction(cell.strip() or 0) for cell in line.split("|")]
        assert cells == [row[key] if key < len(row) else 0 for row in rows]
    values = [sum(row[key] for row in rows[key:]) for key in range(4)]
    outputs = [sum(weight * 3 * k for weight, k in zip(row, x, strict=False)) for row in rows]
    first, second = (
        sum(v * k for v, k in zip(values[s], x[s], strict=True)) for s in (slice(0, 2), slice(2, 4))
    )
    for number in (*values[:2], first, second, first + second):
        assert f"{float(number):.4f}" in page
    assert f"{float(sum(outputs))}" in page and f"{float(outputs[1])}" in page
    done = subprocess.run([sys.executable, DOCS / "worked_example.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("below 1e-14") == 2
    assert f"{float(first + second):.4f}" in done.stdout and "-0.0177" in done.stdout and "-0.0177" in page


# ---- links and files


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    source = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", source):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), target
        if anchor:
            headings = {slug(h) for h in re.findall(r"^#+ (.*)$", linked.read_text(), re.M)}
            assert anchor in headings, target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_included_files_are_there(page: Path) -> None:
    for target in re.findall(r"^```\{(?:literal)?include\} (\S+)$", page.read_text(), re.M):
        made = target.startswith("_generated/")
        assert made or (page.parent / target).is_file(), target


def test_every_page_can_be_reached_and_every_example_is_in_the_guide() -> None:
    listed = set(re.findall(r"^(\w+(?:/\w+)?)$", text("index.md"), re.M))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= listed
    frameworks = set(re.findall(r"^(\w+)$", text("frameworks/index.md"), re.M))
    assert {page.stem for page in (DOCS / "frameworks").glob("*.md")} - {"index"} <= frameworks
    for example in (ROOT / "examples").glob("*.py"):
        assert f"{{literalinclude}} ../examples/{example.name}" in text("guide.md") + text("trainers.md")
        assert f"_generated/{example.stem}.txt" in "".join(page.read_text() for page in PAGES)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` does, but for what the examples print."""
    for package in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-D",
        "run_scripts=0",
        "-b",
        "html",
    ]
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "how_it_works.html").read_text()
    assert "<math" in page
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    assert not loaded, "a page must not load anything from elsewhere"


def test_every_instruction_is_on_the_page_of_schedules() -> None:
    """By the first word of each text that the printers make."""
    terms = re.findall(r"`([^`\n]+)`", text("reading_a_schedule.md"))
    words = set()
    for module in ("passes/s6_schedule/text.py", "passes/step/text.py"):
        for node in ast.walk(ast.parse((ROOT / module).read_text())):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                words |= set(re.findall(r"^([a-z-]{3,}) ", str(node.values[0].value)))
    assert len(words) > 25 and not {w for w in words if not any(w in term.split() for term in terms)}
