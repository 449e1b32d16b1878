"""Measures steps: one process for the peak and one for the time of each mode, the same weights and batch.

NOTE [turns]: a machine's speed drifts over minutes. So on a CPU the processes that are timed are alive
together and take step for step in turn: a drift meets all modes alike. A GPU's memory would have to hold all
of them; there they run one after the other, in rounds, every second one backwards.

NOTE [steady times]: what the kernel takes for a page that is touched for the first time differs between
hours, and checkpointing touches millions of them in a step: the same step of it took 6.5 to 8.3 s, and ratios
against it 0.74 to 0.99. So ratios that are compared with those of another day are of processes whose
allocator keeps what it has. Those of a day are taken as they are: memory has its price.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from streambp_fx.measure.step import Measurement, WorkerError, run_isolated
from streambp_fx.models.loading import load_model, save_copy

from .build import PeerSpec
from .cases import Workload
from .modes import PEER, Mode, Setup

WORKER = (sys.executable, "-m", "benchmarks.worker")
#: Losses of equal steps differ by the rounding of sums taken in another order, relatively, by dtype.
LOSS_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 2e-2, "float16": 1e-2}

#: glibc's allocator gives nothing back to the system, see NOTE [steady times].
STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}

Say = Callable[[str], None]


@dataclass
class Result:
    """What one mode took for one workload.

    Attributes:
        peak_bytes: over weights and gradients, the largest of the measured steps; None: not measured.
        seconds: of each measured step; empty: not measured.
        loss: of the first measured step.
        reason: why there are no figures.
        notes: of the process, e.g. that a part runs unchunked.
    """

    workload: Workload
    mode: Mode
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    loss: float | None = None
    reason: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """The slowest step less the fastest, relative to the median."""
        middle = self.median
        return (max(self.seconds) - min(self.seconds)) / middle if middle else None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; bytes and seconds."""
        return {
            "workload": asdict(self.workload),
            "mode": self.mode.name,
            "label": self.mode.label,
            "settings": self.mode.settings,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "median_seconds": self.median,
            "spread": self.spread,
            "loss": self.loss,
            "reason": self.reason,
            "notes": self.notes,
        }


#: What is to be measured: a mode on a workload.
Item = tuple[Workload, Mode]


class Meter:
    """Measures each mode on each workload once, however often it is asked for.

    Args:
        setup: what there is to run on and with.
        steps: measured steps of a run for the time.
        rounds: runs for the time; see NOTE [turns].
        threads: of PyTorch; 0: its default.
        steady: time without the price of memory, see NOTE [steady times].
        say: told what is being run.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        steps: int = 3,
        rounds: int = 1,
        threads: int = 0,
        steady: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.setup, self.steps, self.rounds, self.threads = setup, steps, rounds, threads
        self.steady, self.say = steady, say
        self.results: dict[Any, Result] = {}
        self._sources: dict[Any, str] = {}
        self._folder: Path | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Meter]:
        """Within: there is a folder for weights, which all processes load."""
        disable_progress_bar()  # of writing weights
        self._folder = Path(tempfile.mkdtemp(prefix="streambp-fx-benchmarks-"))
        try:
            yield self
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._sources = None, {}

    def measure(self, items: Sequence[Item], time: bool = True) -> None:
        """Measure what has not been measured yet; without `time` the peaks alone."""
        new = {self._key(w, m): (w, m) for w, m in items if self._key(w, m) not in self.results}
        for key, (workload, mode) in new.items():
            self.results[key] = result = Result(workload, mode)
            result.reason = mode.unavailable(self.setup, workload.model_type)
            if result.reason is None:
                self._run(result, "peak")
        timed = [self.results[key] for key in new if self.results[key].reason is None]
        for again in range(self.rounds if time else 0):
            self._time(timed[:: -1 if again % 2 else 1])
        self._compare_losses(new.values())

    def time_again(self, items: Sequence[Item]) -> None:
        """Take more steps of what was measured: medians are of all."""
        found = {self._key(w, m): self.result(w, m) for w, m in items}
        self._time([r for r in found.values() if r.reason is None])

    def _time(self, results: Sequence[Result]) -> None:
        """One run of each, see NOTE [turns]."""
        if self.setup.device != "cpu" or not results:
            for result in results:
                self._run(result, "time")
            return
        assert self._folder is not None
        turns = str(self._folder / "turns")
        with ThreadPoolExecutor(len(results)) as pool:
            list(pool.map(lambda result: self._run(result, "time", turns), results))

    def result(self, workload: Workload, mode: Mode) -> Result:
        """What was measured."""
        return self.results[self._key(workload, mode)]

    def _key(self, workload: Workload, mode: Mode) -> Any:
        return workload.model_key, workload.tokens, workload.batch, mode.name, mode.chunked and workload.chunk

    def source(self, workload: Workload) -> str:
        """A folder with the model's config and weights, written once."""
        assert self._folder is not None, "measure within opened()"
        key = workload.model_key
        if key not in self._sources:
            folder = self._folder / f"model-{len(self._sources)}"
            folder.mkdir()
            source, config = workload.source, workload.config
            if config is not None:
                source = str(folder / "given.json")
                Path(source).write_text(json.dumps(config))
            loaded = load_model(source, getattr(torch, workload.dtype))
            self._sources[key] = save_copy(loaded, folder)
            if config is not None:  # as given, with what other releases of transformers read
                written = folder / "config.json"
                written.write_text(json.dumps({**json.loads(written.read_text()), **config}))
            for note in loaded.notes if workload.config is None else ():
                self.say(note)
        return self._sources[key]

    def spec(self, workload: Workload, mode: Mode, steps: int) -> PeerSpec:
        """The step of a mode on a workload, for a process."""
        path = self.setup.reference if mode.step == "reference" else None
        return PeerSpec(
            self.source(workload),
            mode.step,
            workload.tokens,
            min(workload.chunk, workload.tokens),
            loss_chunk=mode.loss_chunk,
            dtype=workload.dtype,
            batch_size=workload.batch,
            threads=self.threads,
            steps=steps,
            device=self.setup.device,
            options=dict(mode.options),
            path=None if path is None else str(path.resolve()),
        )

    def _command(self, mode: Mode) -> tuple[str, ...]:
        if mode.step != "published":
            return WORKER
        assert self.setup.published is not None
        python = self.setup.published_python or self.setup.published / ".venv" / "bin" / "python"
        script = Path(__file__).with_name("published.py")
        return (str(python), str(script), "--checkout", str(self.setup.published))

    def _run(self, result: Result, what: str, turns: str | None = None) -> None:
        workload, mode = result.workload, result.mode
        self.say(f"{workload.title}: {mode.name}, {what}")
        seconds: list[float] = []

        def heard(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                seconds.append(event["seconds"])

        # A first step warms up; a peak needs one more, a time some more.
        spec = replace(self.spec(workload, mode, 1 if what == "peak" else self.steps), turn_file=turns)
        try:
            env = STEADY if self.steady and what == "time" else {}
            measured = run_isolated(spec, what, heard, self._command(mode), env)
        except (WorkerError, OSError) as error:
            result.reason = f"failed: {str(error).strip().splitlines()[-1][:200]}"
            return
        self._keep(result, measured, seconds, what)

    @staticmethod
    def _keep(result: Result, measured: Measurement, seconds: list[float], what: str) -> None:
        result.loss = measured.losses[0]
        new = [n for n in measured.notes if n not in result.notes and "weights are random" not in n]
        result.notes += new
        if what == "peak":
            result.peak_bytes = measured.peak_bytes
        else:
            result.seconds += seconds

    def _compare_losses(self, items: Any) -> None:
        """A mode that computes another loss takes another step: it gets no figures."""
        for workload, mode in items:
            result, peers = self.result(workload, mode), self._peers(workload)
            if result.loss is None or not peers:
                continue
            expected = peers[0].loss
            # The mean is over all tokens but the last of each sequence; the published code divides by all.
            tolerance = max(LOSS_TOLERANCE[workload.dtype], 2 / workload.tokens)
            if not math.isclose(result.loss, expected, rel_tol=tolerance):
                result.reason = f"another loss: {result.loss:.6g} instead of {expected:.6g}"
                result.peak_bytes, result.seconds = None, []

    def _peers(self, workload: Workload) -> list[Any]:
        same = (workload.model_key, workload.tokens, workload.batch)
        found = (self.results.get((*same, name, False)) for name in (PEER, "eager"))
        return [r for r in found if r is not None and r.loss is not None]
