"""The table of versions: what is read of a run, what is kept, and what the page says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from compat import __main__, table
from compat.combinations import COMBINATIONS

from streambp_fx.versions import MINIMUM

REPORT = """<testsuites><testsuite>
<testcase name="test_transform[llama]"/><testcase name="test_transform[gpt2]"><failure/></testcase>
<testcase name="test_verify"/><testcase name="test_planner"><error/></testcase>
<testcase name="test_inductor"><skipped/></testcase>
</testsuite></testsuites>"""
VERSIONS = {"python": "3.12.1", "torch": "2.15.0+cpu", "transformers": "5.24.0", "trl": "1.16.0"}


def test_what_is_read_of_a_run() -> None:
    counts, failed = table.read(REPORT)
    assert counts == {"transform": [1, 2], "verify": [1, 1], "planner": [0, 1]}
    assert failed == ["test_transform[gpt2]", "test_planner"]


def test_a_row_replaces_the_older_one_of_the_same_versions(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    first = table.result(VERSIONS, REPORT, 12.3)
    older = {**first, "torch": "2.9.0"}
    for found in (first, older, {**first, "seconds": 99}):
        table.record(found, path)
    kept = json.loads(path.read_text())
    assert [(k["torch"], k["seconds"]) for k in kept] == [("2.9.0", 12), ("2.15.0", 99)]


def test_the_page_says_what_passed_and_what_failed() -> None:
    text = table.page([table.result(VERSIONS, REPORT, 1)], MINIMUM, ["llama", "gpt2"])
    cells = next(line for line in text.splitlines() if line.startswith("| 3.12.1")).split(" | ")
    assert cells[1:5] == ["2.15.0", "5.24.0", "1.16.0", "1 of 2"]
    assert cells.count("-") == len(table.COLUMNS) - 3, "what did not run has no number"
    assert "TRL 1.16.0: test_transform[gpt2], test_planner" in text
    assert f"PyTorch {MINIMUM['torch']} and transformers {MINIMUM['transformers']} are the oldest" in text


def test_a_column_is_a_function_of_the_subset() -> None:
    source = ast.parse((Path(__file__).parent / "test_subset.py").read_text())
    functions = [n.name for n in source.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    assert [f"test_{column}" for column in table.COLUMNS] == functions


def test_the_oldest_that_are_supported_are_tried() -> None:
    oldest = MINIMUM["python"], MINIMUM["torch"], MINIMUM["transformers"]
    tried = [(c.python, c.torch, c.transformers.removesuffix(".0")) for c in COMBINATIONS]
    assert oldest in tried, f"{oldest} are in MINIMUM, and in no combination"


def test_the_page_is_that_of_what_is_kept() -> None:
    kept = json.loads(table.RECORD.read_text())
    families = __main__.constant(Path(__file__).parent / "test_subset.py", "FAMILIES")
    assert table.PAGE.read_text() == table.page(kept, MINIMUM, families), "make compat writes it"
    found = table.IN_README.search(table.README.read_text())
    assert found is not None and found[0] == table.in_readme(kept), "make compat writes it, too"
