"""What was found, kept as JSON beside the documentation, and the page that is made of it."""

from __future__ import annotations

import datetime
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "_static" / "versions.json", DOCS / "versions.md"
README = DOCS.parent / "README.md"
#: What of the README is written by `make compat`.
IN_README = re.compile(r"(?<=<!-- versions -->).*?(?=<!-- end of versions -->)")
NAMES = ("python", "torch", "transformers", "trl")
TITLES = ("Python", "PyTorch", "transformers", "TRL")
#: Columns: a function of the subset, its title, and what it is.
COLUMNS = {
    "transform": (
        "transform",
        "`streambp_fx.transform`: loss and every gradient against eager in float64, with "
        "padding, every segment in chunks, for {families}",
    ),
    "compile": (
        "compile",
        '`torch.compile(model, backend="streambp")`: the same without padding, at two lengths',
    ),
    "objective": ("objectives", "functions of a model that are compiled: a mean, and one of pairs"),
    "another": (
        "another compiler",
        "a transformed model under `torch.compile` with another backend is streamed",
    ),
    "programs": ("programs", "one program for all chunks and all lengths, and no error in a log"),
    "inductor": ("inductor", '`body="inductor"`, in float32'),
    "trainer": (
        "trainer",
        "TRL's `SFTTrainer`, or `Trainer` where TRL cannot be installed, with the callback: the log and all "
        "weights",
    ),
    "schedule": ("schedule", "the schedule of a step that is not run"),
    "verify": ("verify", "`streambp_fx.verify` finds a step right"),
    "planner": ("plan", "`streambp-fx plan`, and the longest sequences that fit"),
}
INTRODUCTION = """# Versions

`make compat` makes an environment for each of these combinations and runs the same tests in it, a column each
(`tests/compat/test_subset.py`). A number is how many of them passed. With transformers before 5.3 experts are
`"batched_mm"` in it: what they are by default is not streamed in float64 (see [Limits](limits.md)).

{columns}

{table}

PyTorch {torch} and transformers {transformers} are the oldest that are supported; with older ones the import
is an `UnsupportedVersionError`. TRL 1.16 needs Python 3.11. What is done in another way with older versions
is in one module, `streambp_fx/versions/differences.py`, each with the version at which it can be deleted.

`make compat ARGS="--only torch=2.11"` runs some of them, `ARGS="--list"` lists them. The environments lie
in `~/.cache/streambp-fx/compat` (or in `$STREAMBP_COMPAT`), 5 GB each with a build of PyTorch for CUDA; with
`--remove` each is deleted once it has been used. A Python that is not on the machine is fetched by uv where
uv is installed; a combination without its Python is left out, and is not in the table.
"""

FAILED = """
What failed. A family that cannot be streamed with a version is exact there, too: it runs unchunked, or with
its layers checkpointed, and says so.

"""


def read(report: str) -> tuple[dict[str, list[int]], list[str]]:
    """Of JUnit XML: by column how many passed and how many there are, and the names of those that failed.

    A test that was skipped is not counted.
    """
    counts: dict[str, list[int]] = {}
    failed = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = case.get("name", "")
        wrong = case.find("failure") is not None or case.find("error") is not None
        passed, of = counts.get(column := name.removeprefix("test_").partition("[")[0], (0, 0))
        counts[column] = [passed + (not wrong), of + 1]
        failed += [name] if wrong else []
    return counts, failed


def result(versions: dict[str, str], report: str, seconds: float) -> dict[str, Any]:
    """What is kept of a combination.

    Args:
        versions: by `NAMES`.
        report: of the subset, as JUnit XML.
        seconds: that it took.
    """
    counts, failed = read(report)
    today = datetime.date.today().isoformat()
    own = {"date": today, "counts": counts, "failed": failed, "seconds": round(seconds)}
    return {**{n: versions[n].partition("+")[0] for n in NAMES}, **own}


def record(found: dict[str, Any], path: Path = RECORD) -> None:
    """Keep a result, in the place of an older one of the same versions."""
    kept = json.loads(path.read_text()) if path.is_file() else []
    kept = [k for k in kept if any(k[n] != found[n] for n in NAMES)]
    path.write_text(json.dumps(sorted([*kept, found], key=_order), indent=1) + "\n")


def _order(found: dict[str, Any]) -> list[tuple[int, ...]]:
    order = ("torch", "transformers", "python", "trl")
    return [tuple(map(int, re.findall(r"\d+", found[n]))) for n in order]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each combination, as Markdown."""
    titles = [*TITLES, *(title for title, _ in COLUMNS.values()), "run on"]
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for found in results:
        counts = [found["counts"].get(column) for column in COLUMNS]
        cells = ["-" if c is None else f"{c[0]} of {c[1]}" for c in counts]
        rows.append(f"| {' | '.join([*(found[n] for n in NAMES), *cells, found['date']])} |")
    return "\n".join(rows)


def in_readme(results: Sequence[dict[str, Any]]) -> str:
    """What the README says of them: what was run, and when last."""

    def minors(name: str) -> str:
        found = {tuple(map(int, f[name].split(".")[:2])) for f in results}
        return ", ".join(".".join(map(str, minor)) for minor in sorted(found))

    run = f"PyTorch {minors('torch')}, transformers {minors('transformers')}, Python {minors('python')}"
    return f"{run}, last on {max(f['date'] for f in results)}"


def page(results: Sequence[dict[str, Any]], minimum: dict[str, str], families: Sequence[str]) -> str:
    """The page of the documentation.

    Args:
        results: as `record` keeps them.
        minimum: the oldest versions that are supported, by name.
        families: of `transform` and `compile`.
    """
    told = (
        f"- **{title}**: {text.format(families=', '.join(families))}." for title, text in COLUMNS.values()
    )
    failed = [
        f"- {', '.join(f'{t} {f[n]}' for t, n in zip(TITLES, NAMES, strict=True))}: {', '.join(f['failed'])}"
        for f in results
        if f["failed"]
    ]
    text = INTRODUCTION.format(columns="\n".join(told), table=table(results), **minimum)
    return text + (FAILED + "\n".join(failed) + "\n" if failed else "")
