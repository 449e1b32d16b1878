"""Results for people: tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .cases import CASES, Case
from .measuring import Result
from .modes import MODES, PEER, Setup
from .ratios import Finding, Ratio, met, near

MIB = 2**20


def number(value: float | None, form: str = ".2f", after: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{after}"


def yes_or_no(value: bool | None) -> str:
    """A verdict, or a dash where there is none."""
    return "-" if value is None else ("yes" if value else "NO")


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table whose first columns are text and whose others are figures."""
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right", overflow="fold")
    return table


def case_table(case: Case, results: Sequence[Result]) -> Table:
    """Every mode of a case; a mode without figures says why."""
    table = new_table(
        f"{case.name}: {case.workload.title}",
        "mode",
        "peak MiB",
        "times less",
        "step s",
        "spread",
        "of it",
        "",
    )
    peer = next((r for r in results if r.mode.name == PEER), None)
    for r in results:
        ratio = Ratio.of(r, peer)
        table.add_row(
            r.mode.name,
            number(r.peak_bytes and r.peak_bytes / MIB, ".1f"),
            number(ratio.memory, ".2f", "x"),
            number(r.median, ".2f"),
            number(r.spread, ".0%"),
            number(ratio.time),
            "; ".join(filter(None, [r.reason, *r.notes])),
        )
    table.caption = f"times less and of it: against {PEER} in the same run; spread: slowest less fastest step"
    table.caption_justify = "left"
    return table


def requirement_table(rows: Sequence[tuple[Case, Result | None, Result | None, Result | None]]) -> Table:
    """For each case: its ratios, what it requires, and what the hand-written mode beside reached.

    Args:
        rows: case, our mode, checkpointing, the mode beside; None where not measured.
    """
    table = new_table(
        "Required",
        "case",
        "mode",
        "memory",
        "required",
        "time",
        "required",
        "met",
        "beside",
        "within 15%",
        left=2,
    )
    for case, own, peer, beside in rows:
        ratio, other = Ratio.of(own, peer), Ratio.of(beside, peer)
        shown = f"{number(other.memory, '.1f', 'x')}, {number(other.time)}" if other.memory else "-"
        table.add_row(
            case.name,
            case.mode,
            number(ratio.memory, ".1f", "x"),
            number(case.memory_at_least, ".1f", "x"),
            number(ratio.time),
            number(case.time_at_most),
            yes_or_no(met(case, ratio)),
            shown,
            yes_or_no(near(own, beside)),
        )
    return table


def finding_table(findings: Sequence[Finding]) -> Table:
    """Recorded ratios against those of this run."""
    table = new_table(
        "Against the recorded ratios", "case", "mode", "ratio", "recorded", "now", "worse by", "", left=3
    )
    for f in findings:
        verdict = "ok" if f.ok else ("NOT MEASURED" if f.measured is None else "WORSE")
        if f.recorded is None:
            verdict = "new"
        form = ".2f"
        cells = (number(f.recorded, form), number(f.measured, form), number(f.worse_by, "+.0%"), verdict)
        table.add_row(f.case, f.mode, f.what, *cells)
    return table


def list_tables(setup: Setup) -> list[Table]:
    """All cases and all modes, and what of it can run here."""
    cases = new_table("Cases", "case", "workload", "our mode", "memory", "time", left=3)
    for case in CASES.values():
        required = number(case.memory_at_least, ".1f", "x"), number(case.time_at_most)
        cases.add_row(case.name, case.workload.title, case.mode, *required)
    cases.add_row("batch", "largest batch at 2,048 tokens and one amount of memory", "streamed", "-", "-")
    modes = new_table("Modes", "mode", "settings", "here", left=3)
    for mode in MODES.values():
        settings = mode.settings or ", ".join(f"{k}={v!r}" for k, v in mode.options.items())
        modes.add_row(mode.name, settings, mode.unavailable(setup, "qwen3") or "yes")
    return [cases, modes]
