"""In the process of one mode: steps of a model that is built on the device, and the longest that fits."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

import streambp_fx
from streambp_fx.measure.step import Measurement, measure_step
from streambp_fx.models.loading import random_tokens

from .build import PeerSpec, build
from .modes import MODES, Setup

Emit = Callable[[dict[str, Any]], None]
#: How many kernels are listed.
KERNELS = 24


@dataclass(frozen=True)
class Job:
    """What one mode is to do.

    Attributes:
        config: fields of the model's config, its model_type among them.
        mode: one of `modes.MODES`.
        tokens: lengths whose step is measured, ascending.
        chunk: rows of a chunk of a layer, or "auto".
        seconds: for all of it, from the start of the process.
        activation_bytes: what a step may take over weights and gradients in the search for the longest; None:
            what the device has.
        longest: search the longest sequence that fits, up to this many tokens; 0: do not.
        steps: measured at each length, after a warm-up.
        exact: compare gradients with eager's at this length instead of all that; 0: do not.
        unit: the search tries multiples of so many tokens.
        loss_chunk: rows of a chunk of the loss head of a mode of ours; None: as it is chosen.
        profile: list the kernels of one more step at each length.
    """

    config: dict[str, Any]
    mode: str
    tokens: tuple[int, ...] = ()
    chunk: int | Literal["auto"] = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    seconds: float = 60.0
    activation_bytes: int | None = None
    longest: int = 0
    steps: int = 2
    exact: int = 0
    unit: int = 1024
    loss_chunk: int | None = None
    profile: bool = False


def make_model(given: Mapping[str, Any], device: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights, made on a device, from a config with its type: each time the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(given)
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def make_step(model: nn.Module, job: Job) -> Callable[[torch.Tensor], float]:
    """The step of the job's mode."""
    mode = MODES[job.mode]
    spec = PeerSpec(
        "given",
        mode.step,
        2**20,
        job.chunk,
        loss_chunk=job.loss_chunk if mode.ours else mode.loss_chunk,
        dtype=job.dtype,
        device=job.device,
        options=dict(mode.options),
    )
    return build(model, spec)


def clear_gradients(model: nn.Module) -> None:
    """Zero gradients that exist: peaks are over weights and gradients."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


class Steps:
    """Runs and measures steps of one mode on one model."""

    def __init__(self, job: Job, started: float) -> None:
        self.job, self.started = job, started
        self.model = make_model(job.config, job.device, getattr(torch, job.dtype))
        clear_gradients(self.model)
        self.step = make_step(self.model, job)
        self.vocab = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def left(self) -> float:
        """Seconds until the job has to end."""
        return self.job.seconds - (time.monotonic() - self.started)

    def measure(self, tokens: int) -> Measurement | None:
        """One step; None if memory does not suffice."""
        ids = random_tokens(self.vocab, tokens).view(1, tokens).to(self.job.device)
        loss: list[float] = []
        try:
            clear_gradients(self.model)
            measured = measure_step(lambda: loss.append(self.step(ids)), self.job.device)
        except torch.OutOfMemoryError:
            measured = None
        if measured is None:  # outside of the handler: its traceback holds the step's tensors
            self.release()
            return None
        return replace(measured, losses=tuple(loss))

    def release(self) -> None:
        """Give cached memory back to the device."""
        gc.collect()
        if self.job.device == "cuda":
            torch.cuda.empty_cache()

    def at_lengths(self, emit: Emit) -> float | None:
        """Peak and median time at each length that fits; returns the seconds of the last."""
        last = None
        for tokens in self.job.tokens:
            expected = 0.0 if last is None else 4 * last * (self.job.steps + 1)
            if expected > self.left():
                emit({"event": "length", "tokens": tokens, "reason": "no time left"})
                continue
            first, *measured = [self.measure(tokens) for _ in range(self.job.steps + 1)]
            if first is None or any(m is None for m in measured):
                emit({"event": "length", "tokens": tokens, "reason": "out of memory"})
                return last
            found = [m for m in measured if m is not None]
            seconds = [m.seconds for m in found]
            last = statistics.median(seconds)
            peak = max(m.peak_bytes for m in found)
            loss = found[-1].losses[0]
            event = {"tokens": tokens, "peak_bytes": peak, "seconds": seconds, "median": last, "loss": loss}
            more = {"first": {"seconds": first.seconds, "peak_bytes": first.peak_bytes}, **self.self_check()}
            emit({"event": "length", **event, **more})
            if self.job.profile:
                emit({"event": "kernels", "tokens": tokens, **self.kernels(tokens)})
        return last

    def self_check(self) -> dict[str, Any]:
        """What the self-check said, its seconds among it; nothing in a mode that has none."""
        schedule = streambp_fx.schedule(self.model)
        check = None if schedule is None else schedule.check
        return {} if check is None else {"check": list(check.lines()), "check_seconds": check.seconds}

    def kernels(self, tokens: int) -> dict[str, Any]:
        """Of one step the milliseconds in kernels, and calls and milliseconds by kernel, the most first."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            self.measure(tokens)
        events = [e for e in found.key_averages() if e.device_time_total > 0]
        events.sort(key=lambda e: -e.device_time_total)
        rows = [(e.key[:90], e.count, round(e.device_time_total / 1000, 2)) for e in events[:KERNELS]]
        return {"milliseconds": sum(e.device_time_total for e in events) / 1000, "rows": rows}

    def fits(self, tokens: int) -> tuple[bool, float]:
        """Whether a step fits the memory of the search, and its seconds."""
        measured = self.measure(tokens)
        if measured is None:
            return False, 0.0
        limit = self.job.activation_bytes
        return limit is None or measured.peak_bytes <= limit, measured.seconds

    def longest(self, emit: Emit) -> None:
        """The longest sequence that fits, by doubling and bisection, as exact as the time allows."""
        unit, low, high, took = self.job.unit, 0, None, {}  # type: ignore[var-annotated]
        tokens, reason = unit, "found"
        while high is None or high - low > max(unit, low // 16):
            before = max(took, default=0)
            expected = took[before] * (tokens / before) ** 2 if before else 0.0
            if expected > self.left():
                reason = "no time left"
                break
            good, seconds = self.fits(tokens)
            if good:
                low, took[tokens] = tokens, max(seconds, 1e-3)
                if low >= self.job.longest:
                    reason = "the longest that was tried"
                    break
            else:
                high = tokens
            emit({"event": "tried", "tokens": tokens, "fits": good, "seconds": seconds})
            tokens = (
                min(2 * low or unit, self.job.longest) if high is None else (low + high) // 2 // unit * unit
            )
            if tokens <= low:
                break
        emit({"event": "longest", "tokens": low, "too_many": high, "reason": reason})


def cap_memory(steps: Steps, activation_bytes: int) -> None:
    """Let the allocator refuse more than weights, gradients and `activation_bytes`."""
    steps.release()  # what is cached counts as well
    held = torch.cuda.memory_allocated()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + activation_bytes) / whole))


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a parameter's gradient, in the L2 norm."""
    errors = []
    for name, right in expected.items():
        wrong = (found[name].double() - right.double()).norm()
        errors.append(float(wrong / right.double().norm().clamp(min=1e-300)))
    return max(errors)


def exactness(job: Job) -> dict[str, Any]:
    """Errors of gradients, against eager in float32, of eager and of the job's mode in float32 and the dtype.

    And of the mode without cuDNN's attention, on a GPU. All start from the same weights, rounded to the
    dtype, so that what differs is the arithmetic. What fails says so and leaves the others their figures.
    """
    small = getattr(torch, job.dtype)
    expected: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {"tokens": job.exact}
    unavailable = MODES["streamed-flash"].unavailable(Setup(job.device), job.config["model_type"])
    names = ("eager", job.mode) if unavailable else ("eager", job.mode, "streamed-flash")
    for dtype in dict.fromkeys((torch.float32, small)):
        for name in names:
            model = make_model(job.config, job.device, torch.float32).to(small).to(dtype)
            step = make_step(model, replace(job, mode=name))
            ids = random_tokens(job.config["vocab_size"], job.exact).view(1, -1).to(job.device)
            clear_gradients(model)
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            try:
                loss = step(ids)
            except RuntimeError as error:
                if not expected:
                    raise
                found[key] = {"reason": f"{type(error).__name__}: {error}"}
                continue
            gradients = _gradients(model)
            expected = expected or gradients
            found[key] = {"loss": loss, "gradient_error": _distance(gradients, expected)}
    return found


def run(job: Job, emit: Emit) -> None:
    """Do the job; what is found is emitted as it is found."""
    started = time.monotonic()
    if job.exact:
        emit({"event": "exact", "mode": job.mode, **exactness(job)})
        return
    steps = Steps(job, started)
    emit({"event": "ready", "parameters": sum(p.numel() for p in steps.model.parameters())})
    steps.at_lengths(emit)
    if job.longest:
        if job.device == "cuda" and job.activation_bytes is not None:
            cap_memory(steps, job.activation_bytes)
        steps.longest(emit)


def main() -> int:
    """The process: a job as JSON on standard input, events as lines of JSON on standard output."""
    fields = json.load(sys.stdin)
    job = Job(**{**fields, "tokens": tuple(fields["tokens"])})

    def emit(event: dict[str, Any]) -> None:
        print("event " + json.dumps(event), flush=True)

    run(job, emit)
    return 0


def as_json(job: Job) -> str:
    """A job for a process."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    sys.exit(main())
