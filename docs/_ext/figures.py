"""The figures of the page on benchmarks, from what `make bench ARGS="--docs"` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 2**20
NONE_YET = 'No figures have been recorded yet: `make bench ARGS="--docs"` does.\n'


def _table(*rows: list[str]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def _number(value: float | None, form: str = ".2f", after: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{after}"


def _required(cases: dict[str, Any]) -> list[str]:
    rows = [["case", "step", "mode", "memory below checkpointing", "required", "time", "required", "met"]]
    for name, case in cases.items():
        measured, required = case["measured"], case["required"]
        memory = _number(measured["memory"], ".1f", "x"), _number(required["memory"], ".1f", "x")
        time = _number(measured["time"]), _number(required["time"])
        met = {True: "yes", False: "no", None: "-"}[case["met"]]
        rows.append([name, case["title"], f"`{case['mode']}`", *memory, *time, met])
    return _table(*rows)


def _modes(case: dict[str, Any]) -> list[str]:
    rows = [["mode", "peak, MiB", "times less", "seconds", "spread", "of checkpointing's time", ""]]
    for r in case["results"]:
        peak = _number(r["peak_bytes"] and r["peak_bytes"] / MIB, ",.0f")
        time = _number(r["median_seconds"], ".3g"), _number(r["spread"], ".0%"), _number(r["time"])
        rows.append([f"`{r['mode']}`", peak, _number(r["memory"], ".1f", "x"), *time, r["reason"] or ""])
    return _table(*rows)


def _settings(cases: dict[str, Any]) -> list[str]:
    """How every mode was run, each once."""
    found = {r["mode"]: (r["label"], r["settings"]) for case in cases.values() for r in case["results"]}
    return _table(["mode", "", "settings"], *([f"`{m}`", *texts] for m, texts in found.items()))


def _sweep(axis: str, sweep: dict[str, Any]) -> list[str]:
    rows = [["mode", "peak grows as", "time grows as", "bytes a token", "of the floor"]]
    for mode, fit in sweep["fits"].items():
        powers = (_number(fit[f"{k}_exponent"], ".2f") for k in ("peak", "time"))
        grown = _number(fit.get("bytes_per_token"), ",.0f"), _number(fit.get("times_floor"), ".2f", "x")
        rows.append([f"`{mode}`", *(p if p == "-" else f"{axis} ^ {p}" for p in powers), *grown])
    return _table(*rows)


def _batch(batch: dict[str, Any]) -> list[str]:
    rows = [["mode", "largest batch that fits", "smallest that does not"]]
    for s in batch["searches"]:
        rows.append([f"`{s['mode']}`", str(s["fits"]), _number(s["too_many"], "d")])
    title = f"{batch['tokens']:,} tokens in {batch['budget_bytes'] / MIB:,.0f} MiB:"
    return [title, "", *_table(*rows)]


def _picture(folder: Path, name: str, text: str) -> list[str]:
    return [f"![{text}](_static/{name})", ""] if (folder / name).is_file() else []


def benchmark_figures(folder: Path) -> str:
    """All figures in Markdown, from benchmarks.json and pictures in a folder."""
    path = folder / "benchmarks.json"
    if not path.is_file():
        return NONE_YET
    document = json.loads(path.read_text())
    machine, cases = document["environment"], document.get("cases", {})
    device = machine.get("gpu") or f"{machine['threads']} threads of {machine['processor']}"
    lines = [f"PyTorch {machine['torch']}, transformers {machine['transformers']}, {device}.", ""]
    if cases:
        lines += ["### Required and measured", "", *_required(cases)]
        lines += _picture(folder, "benchmarks.svg", "Peak and time of every mode")
        for name, case in cases.items():
            lines += [f"### Case {name}", "", f"{case['title']}.", "", *_modes(case)]
        lines += ["### Settings", "", *_settings(cases)]
    for axis, sweep in document.get("sweeps", {}).items():
        lines += [f"### Growth with {axis}", "", *_sweep(axis, sweep)]
        lines += _picture(folder, f"benchmarks-{axis}.svg", f"Peak and time against {axis}")
    if "batch" in document:
        lines += ["### Largest batch", "", *_batch(document["batch"])]
    return "\n".join(lines)
