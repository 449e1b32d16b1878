"""Peak memory and time of one training step, measured in a process of its own.

NOTE [peak and time come from different steps]
On Linux the C allocator keeps freed memory of small and middle-sized tensors, so the resident set
shows what was once live and not what is. For a peak, MALLOC_MMAP_THRESHOLD_=65536 is set in the
child's environment: every tensor of 64 KiB or more is mapped and unmapped by itself and the kernel's
high-water mark (VmHWM) is what is live. The page faults that this causes cost time, a large part of
a step where tensors are small, so a run for the time leaves the allocator alone. A run for both
takes the peak from its first step and the time from the others, and between them sets the allocator
to the thresholds that it reaches by itself in a run for the time (glibc raises them up to 32 MiB).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import torch

MODES = ("eager", "checkpointing", "streamed")
DTYPES = ("float32", "bfloat16", "float16", "float64")
WHATS = ("peak", "time", "both")
MMAP_THRESHOLD = 65536
#: Seconds after a turn in which those who wait for theirs go first.
PAUSE = 0.05
#: How the process that runs a step is started; `--what` and `--json` are added.
WORKER = (sys.executable, "-m", "streambp_fx.measure.worker")

Event = dict[str, Any]


class MeasurementError(RuntimeError):
    """This platform cannot tell the peak memory of a step."""


class WorkerError(RuntimeError):
    """The process that runs a step failed; the message ends with the last lines it wrote."""


@dataclass(frozen=True)
class Measurement:
    """What one or several equal training steps took.

    Attributes:
        seconds: wall time of forward and backward; the median when there are several steps.
        peak_bytes: largest memory in use during the step over the level before it; the largest of
            several steps. With gradients allocated beforehand: over weights and gradients. Means
            little in a run for the time only, see NOTE [peak and time come from different steps].
        losses: the loss of each measured step.
        notes: what the process had to say, e.g. that weights are random or a part runs unchunked.
    """

    seconds: float
    peak_bytes: int
    losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepSpec:
    """One training step to be measured; can be sent to another process as JSON.

    Attributes:
        source: what `models.loading.load_model` takes: "smollm2", a model directory or a config file.
        mode: "eager", "checkpointing" (Hugging Face gradient checkpointing) or "streamed".
        seq_len: tokens of each sequence.
        chunk, loss_chunk: sequence rows of a chunk of a layer and of the loss head ("streamed" only); a
            chunk of "auto" and a loss_chunk of None are chosen by `transform`.
        dtype: of weights and activations, one of `DTYPES`.
        batch_size: sequences in the batch.
        threads: of PyTorch in the process; 0 leaves PyTorch's default.
        steps: measured steps, after the warm-up.
        warmup_len: tokens of the warm-up step, at most seq_len; None: seq_len.
        learning_rate: 0 leaves the weights as they are; above 0, AdamW updates them after each measured
            step, outside the measured time.
        seed: of random weights and of random token ids.
        batch_file: a file with the token ids, int64 (batch_size, seq_len), written by `torch.save`;
            None: random ids.
        gradients_file: where to `torch.save` the gradients of the first measured step, as a dict of
            parameter name to tensor; None: nowhere.
        device: "cpu" or a CUDA device.
        turn_file: workers with the same file take turns, see `turn`; None: this one waits for nobody.
        options: further options of `transform` ("streamed" only).

    Raises:
        ValueError: a field is out of range.
    """

    #: What `mode` may be. A subclass that names more is run by a worker that knows them.
    modes: ClassVar[tuple[str, ...]] = MODES

    source: str
    mode: str
    seq_len: int
    chunk: int | Literal["auto"]
    loss_chunk: int | None = 256
    dtype: str = "float32"
    batch_size: int = 1
    threads: int = 0
    steps: int = 1
    warmup_len: int | None = None
    learning_rate: float = 0.0
    seed: int = 0
    batch_file: str | None = None
    gradients_file: str | None = None
    device: str = "cpu"
    turn_file: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in self.modes:
            raise ValueError(f"mode must be one of {', '.join(self.modes)}, not {self.mode!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        minima = {"seq_len": 2, "chunk": 1, "loss_chunk": 1, "batch_size": 1, "steps": 1, "threads": 0}
        for name, minimum in minima.items():
            given = getattr(self, name)
            if given is not None and not (name == "chunk" and given == "auto") and given < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        if self.warmup_len is not None and not 2 <= self.warmup_len <= self.seq_len:
            raise ValueError(f"warmup_len must be from 2 to seq_len={self.seq_len}, not {self.warmup_len}")


def _status_bytes(key: str) -> int:
    """A memory field of /proc/self/status ("VmRSS", "VmHWM"), in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise MeasurementError(f"/proc/self/status has no {key}")


def _reset_high_water_mark() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError as error:
        raise MeasurementError(
            f"peak memory on the CPU needs Linux and a writable /proc/self/clear_refs: {error}"
        ) from error


def measure_step(step: Callable[[], object], device: str | torch.device = "cpu") -> Measurement:
    """Run `step` once and measure its wall time and the peak of memory over the level before it.

    On the CPU the peak is the kernel's high-water mark of the resident set (Linux only); on CUDA it
    is the peak of the caching allocator's memory in use. See NOTE [peak and time come from different
    steps] for how to get an exact peak on the CPU.

    Raises:
        MeasurementError: neither Linux nor CUDA.
    """
    peak = Peak(device)
    step()
    return peak.read()


class Peak:
    """Wall time and peak memory from when it is made to when it is read.

    Args:
        device: "cpu" or a CUDA device.

    Raises:
        MeasurementError: neither Linux nor CUDA.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = device = torch.device(device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.base = torch.cuda.memory_allocated(device)
        elif device.type == "cpu":
            if not sys.platform.startswith("linux"):
                raise MeasurementError(
                    f"peak memory on the CPU can be measured on Linux only, not {sys.platform}"
                )
            _reset_high_water_mark()
            self.base = _status_bytes("VmRSS")
        else:
            raise MeasurementError(f"peak memory cannot be measured on device type {device.type!r}")
        self.start = time.perf_counter()

    def read(self) -> Measurement:
        """Seconds since it was made, and the peak over the level then, in bytes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - self.start
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            seconds, peak = time.perf_counter() - self.start, _status_bytes("VmHWM")
        return Measurement(seconds, max(0, peak - self.base))


@contextlib.contextmanager
def turn(path: str | None) -> Iterator[None]:
    """Within: no other process (or file handle) is in its turn with the same file. POSIX only.

    A machine's speed drifts over minutes. Processes that are compared should be alive at the same time and
    take step for step in turn, so that a drift meets all of them alike.

    Args:
        path: of the file, which is made; None: nobody is waited for.
    """
    if path is None:
        yield
        return
    import fcntl  # not on Windows

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
    time.sleep(PAUSE)


def use_default_allocator() -> None:
    """Undo MALLOC_MMAP_THRESHOLD_ in this process; see NOTE [peak and time come from different steps].

    Does nothing where the C library is not glibc: it does not know the variable either.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform.startswith("linux"):
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 64 << 20)


def _environment(spec: StepSpec, what: str, more: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, **more}
    env.pop("MALLOC_MMAP_THRESHOLD_", None)
    if what != "time":
        env["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD)
    # Threads that wait for each other by spinning slow a step down several times once any other
    # process wants a core; on an idle machine sleeping costs nothing that can be measured.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if spec.threads:
        env["OMP_NUM_THREADS"] = str(spec.threads)
    return env


def _events(stream: IO[str]) -> Iterator[Event]:
    """The worker's messages, one JSON object a line."""
    for line in stream:
        yield json.loads(line)


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])


def run_isolated(
    spec: StepSpec,
    what: str,
    on_event: Callable[[Event], None] | None = None,
    worker: Sequence[str] = WORKER,
    environment: Mapping[str, str] | None = None,
) -> Measurement:
    """Run the steps of `spec` in a process of its own: one warm-up, then `spec.steps` measured ones.

    Args:
        spec: what to run. Weights and batch depend on nothing else, so that runs in different modes
            are of the same step.
        what: which figures the run is for: "peak" or "time", from all steps, or "both": the peak from
            the first step and the time from the others, of which there must be at least one. See NOTE
            [peak and time come from different steps].
        on_event: called in this process with each message of the worker, a dict whose "event" is
            "loaded", "warm" (with "tokens", "loss", "seconds"), "schedule" (with "text"; streamed only),
            "step" (with "index", "loss", "seconds", "peak_bytes"), "note" (with "text") or "done".
        worker: the command that runs the steps; it takes the same arguments and writes the same events.
        environment: further variables of the process.

    Raises:
        ValueError: `what` is none of the three, or "both" with a single step.
        WorkerError: the process failed.
    """
    if what not in WHATS:
        raise ValueError(f"what must be one of {', '.join(WHATS)}, not {what!r}")
    if what == "both" and spec.steps < 2:
        raise ValueError("a run for both peak and time needs at least two steps")
    command = [*worker, "--what", what, "--json", json.dumps(asdict(spec))]
    done: Event | None = None
    with tempfile.TemporaryDirectory(prefix="streambp-fx-") as folder:
        log = Path(folder) / "stderr"
        env = _environment(spec, what, environment or {})
        with (
            open(log, "w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env) as process,
        ):
            assert process.stdout is not None
            try:
                for event in _events(process.stdout):
                    if event["event"] == "done":
                        done = event
                    if on_event is not None:
                        on_event(event)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or done is None:
            raise WorkerError(
                f"the {spec.mode} step of {spec.source} failed in its process "
                f"(exit status {process.returncode}):\n{_tail(log)}"
            )
    return Measurement(
        done["seconds"], done["peak_bytes"], losses=tuple(done["losses"]), notes=tuple(done["notes"])
    )
