"""One run of the benchmarks: what the arguments ask for, in order, and its results in files."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from streambp_fx.units import parse_bytes

from . import batch, frontier, plots, sweeps
from .cases import BATCH, CASES, QUICK, Case, Workload, cases_named, quick, shrunk
from .errors import BenchmarkError
from .measuring import Meter, Result
from .modes import MODES, PEER, Mode, Setup, environment, modes_named
from .ratios import RECORDED, Finding, Ratio, Ratios, compare, met, near, read_recorded, write_recorded
from .tables import case_table, finding_table, requirement_table

#: What the page on benchmarks is made from.
DOCS = Path(__file__).parents[1] / "docs" / "_static"


class Session:
    """Runs what the arguments ask for.

    Args:
        args: of `__main__.parser`.
        setup: the peers that were given.
        console: where tables go.

    Raises:
        BenchmarkError: a case or a mode that does not exist, or sizes that make no sweep.
    """

    def __init__(self, args: argparse.Namespace, setup: Setup, console: Console) -> None:
        self.args, self.setup, self.console = args, setup, console
        self.quick = args.quick or args.check or args.record
        self.cases, self.batch = self._cases()
        self.modes = None if args.modes is None else _with_peer(modes_named(args.modes))
        self.sweeps = {axis: self._steps(axis) for axis in args.sweep or ()}
        self.budget = self._budget()
        self.recorded_at = args.recorded or RECORDED
        self.recorded = read_recorded(self.recorded_at) if args.check else {}
        steps = max(args.steps, 5) if self.quick and not args.tiny else args.steps
        how = {"steps": steps, "rounds": args.rounds, "threads": args.threads or 0}
        self.meter = Meter(setup, **how, steady=args.check or args.record or args.frontier, say=self._say)
        self.document: dict[str, Any] = {"environment": environment(), "arguments": _plain(args)}
        self.groups: list[tuple[Case, list[Result]]] = []

    # ---- what is asked for

    def _cases(self) -> tuple[list[Case], bool]:
        names = list(self.args.case or ())
        with_batch = BATCH in names
        names = [n for n in names if n != BATCH]
        if not names and self.args.frontier:
            names = ["dense"]
        if not names and not with_batch and not self.args.sweep:
            names = list(QUICK if self.quick else CASES)
        cases = cases_named(list(dict.fromkeys(names)))
        if self.quick:
            cases = [quick(c) for c in cases]
        return ([shrunk(c) for c in cases] if self.args.tiny else cases), with_batch

    def _steps(self, axis: str) -> list[Workload]:
        try:
            values = [int(v) for v in self.args.values.split(",")] if self.args.values else None
        except ValueError:
            raise BenchmarkError(
                f"--values {self.args.values}: give whole numbers, as in 1024,2048"
            ) from None
        base = shrunk(CASES["dense"]).workload if self.args.tiny else sweeps.base_of(self.quick)
        return sweeps.workloads(axis, values, base, self.quick)

    def _budget(self) -> int:
        try:
            return parse_bytes(self.args.budget)
        except ValueError as error:
            raise BenchmarkError(f"--budget: {error}") from error

    def _modes(self, case: Case) -> list[Mode]:
        return self.modes or [MODES[name] for name in case.modes()]

    def _say(self, text: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, style="dim")

    # ---- the run

    def run(self) -> int:
        """Measure, show and write; returns the exit status."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        with self.meter.opened():
            if self.args.frontier:
                for case in self.cases:
                    self._frontier(case)
                self._write()
                return 0
            for group in _by_step(self.cases):
                items = [(case.workload, mode) for case in group for mode in self._modes(case)]
                self.meter.measure(items, not self.args.peak_only)
                for case in group:
                    self._finish(case)
            self._confirm()
            for axis, steps in self.sweeps.items():
                self._sweep(axis, steps)
            if self.batch:
                self._batch()
        if self.groups:
            self.console.print(requirement_table([(c, *self._compared(c)) for c, _ in self.groups]))
        self._draw()
        self._write()
        return self._against_recorded()

    def _finish(self, case: Case) -> None:
        results = [self.meter.result(case.workload, mode) for mode in self._modes(case)]
        self.groups.append((case, results))
        self.console.print(case_table(case, results))
        self.document.setdefault("cases", {})[case.name] = self._described(case, results)
        self._write()

    def _compared(self, case: Case) -> tuple[Result | None, Result | None, Result | None]:
        """Our mode, checkpointing, and the hand-written mode beside."""
        names = (case.mode, PEER, case.beside)
        found = {r.mode.name: r for c, rs in self.groups if c is case for r in rs}
        own, peer, beside = (found.get(n) if n else None for n in names)
        return own, peer, beside

    def _described(self, case: Case, results: list[Result]) -> dict[str, Any]:
        own, peer, beside = self._compared(case)
        ratio = Ratio.of(own, peer)
        return {
            "title": case.workload.title,
            "mode": case.mode,
            "required": {"memory": case.memory_at_least, "time": case.time_at_most},
            "measured": ratio.as_dict(),
            "met": met(case, ratio),
            "beside": {"mode": case.beside, **Ratio.of(beside, peer).as_dict(), "within": near(own, beside)},
            "results": [{**r.as_dict(), **Ratio.of(r, peer).as_dict()} for r in results],
        }

    def _sweep(self, axis: str, steps: list[Workload]) -> None:
        modes = self.modes or modes_named(sweeps.MODES)
        results = sweeps.run_sweep(self.meter, steps, modes, not self.args.peak_only)
        for table in sweeps.sweep_tables(axis, results):
            self.console.print(table)
        fits = {name: sweeps.fitted(axis, own) for name, own in sweeps.by_mode(results).items()}
        found = {"fits": fits, "results": [r.as_dict() for r in results]}
        self.document.setdefault("sweeps", {})[axis] = found
        size = sweeps.AXES[axis].of
        plots.draw_sweep(axis, results, size, self.args.out / f"sweep-{axis}")
        if self.args.docs:
            plots.draw_sweep(axis, results, size, DOCS / f"benchmarks-{axis}", (".svg",))
        self._write()

    def _frontier(self, case: Case) -> None:
        points = frontier.run_frontier(self.meter, case.workload, not self.args.peak_only)
        for table in frontier.frontier_tables(case.workload, points):
            self.console.print(table)
        found = {"title": case.workload.title, "points": [p.as_dict() for p in points]}
        self.document.setdefault("frontiers", {})[case.name] = found
        drawn = plots.draw_frontier(case.workload.title, points, self.args.out / f"frontier-{case.name}")
        if self.args.docs:
            plots.draw_frontier(
                case.workload.title, points, DOCS / f"benchmarks-frontier-{case.name}", (".svg",)
            )
        self.console.print(*drawn, markup=False, soft_wrap=True)

    def _batch(self) -> None:
        base = shrunk(CASES["dense"]).workload if self.args.tiny else None
        searches = batch.run_batch(self.meter, self.budget, base)
        tokens = base.tokens if base else batch.TOKENS
        self.console.print(batch.batch_table(searches, self.budget, tokens))
        self.document["batch"] = {
            "tokens": tokens,
            "budget_bytes": self.budget,
            "searches": batch.as_dicts(searches),
        }

    # ---- what is left behind

    def _write(self) -> None:
        (self.args.out / "results.json").write_text(json.dumps(self.document, indent=2) + "\n")
        if self.args.docs:
            _merge(DOCS / "benchmarks.json", self.document)

    def _draw(self) -> None:
        if not self.groups:
            return
        drawn = plots.draw_cases(self.groups, self.args.out / "cases")
        if not drawn:
            self.console.print("no picture: matplotlib is not installed, or nothing was measured")
        elif self.args.docs:
            plots.draw_cases(self.groups, DOCS / "benchmarks", (".svg",))
        self.console.print(f"results: {self.args.out / 'results.json'}", *drawn, markup=False, soft_wrap=True)

    def _ratios(self) -> Ratios:
        """Of our modes, by case."""
        found: Ratios = {}
        for case, results in self.groups:
            peer = next((r for r in results if r.mode.name == PEER), None)
            own = {r.mode.name: Ratio.of(r, peer).as_dict() for r in results if r.mode.ours and not r.reason}
            found[case.name] = own
        return found

    def _findings(self) -> list[Finding]:
        """What was measured beside what is recorded of it."""
        ran = {case.name for case, _ in self.groups}
        recorded = {name: modes for name, modes in self.recorded.items() if name in ran}
        return compare(self._ratios(), recorded, self.args.tolerance)

    def _confirm(self) -> None:
        """Time again what seems to have become slower: a few steps on a busy machine say little."""
        slower = {f.case for f in self._findings() if not f.ok and f.what == "time" and f.measured}
        for group in _by_step([case for case, _ in self.groups if case.name in slower]):
            self.meter.time_again([(case.workload, mode) for case in group for mode in self._modes(case)])
        for case, results in self.groups:
            self.document["cases"][case.name] = self._described(case, results)

    def _against_recorded(self) -> int:
        """The exit status: 1 where a recorded ratio got worse."""
        if self.args.record:
            write_recorded(self._ratios(), self.document["environment"], self.recorded_at)
            self.console.print(f"recorded in {self.recorded_at}", markup=False, soft_wrap=True)
        if not self.args.check:
            return 0
        findings = self._findings()
        self.console.print(finding_table(findings))
        worse = [f for f in findings if not f.ok]
        verdict = f"{len(worse)} of {len(findings)} ratios are worse by more than {self.args.tolerance:.0%}"
        self.console.print(verdict if worse else "nothing got worse", markup=False)
        return 1 if worse or not findings else 0


def _with_peer(modes: list[Mode]) -> list[Mode]:
    """What all are compared with is always measured."""
    return modes if any(m.name == PEER for m in modes) else [MODES[PEER], *modes]


def _by_step(cases: list[Case]) -> list[list[Case]]:
    """Cases whose steps differ in the chunk alone together: their peers are measured once."""
    found: dict[Any, list[Case]] = {}
    for case in cases:
        step = case.workload
        found.setdefault((step.model_key, step.tokens, step.batch), []).append(case)
    return list(found.values())


def _merge(path: Path, document: dict[str, Any]) -> None:
    """Put what was measured into a file that may hold other cases and sweeps."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    for key in ("cases", "sweeps", "frontiers"):
        known.setdefault(key, {}).update(document.get(key, {}))
    known |= {key: document[key] for key in ("environment", "batch") if key in document}
    path.write_text(json.dumps(known, indent=2) + "\n")


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
