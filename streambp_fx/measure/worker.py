"""The process in which one training step is measured.

    python -m streambp_fx.measure.worker --what WHAT --json SPEC

WHAT is "peak", "time" or "both", SPEC is a `StepSpec` as a JSON object. Standard output carries one
JSON object a line, the events that `run_isolated` describes; whatever libraries print goes to
standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import nn

from ..models.loading import load_model, random_tokens
from ..versions.differences import checkpoint_layers
from .step import WHATS, Measurement, StepSpec, measure_step, turn, use_default_allocator

Emit = Callable[..., None]
#: Forward and backward on token ids, int64 (batch_size, seq_len); returns the loss.
TrainingStep = Callable[[torch.Tensor], float]


def _private_stdout() -> IO[str]:
    """Keep standard output for events: everything else that is written to it goes to standard error."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def _report_warnings(emit: Emit, notes: list[str]) -> None:
    """Send streambp-fx's own warnings (parts that run unchunked) to the parent; show the others as usual."""
    show = warnings.showwarning

    def handler(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if category.__module__.startswith("streambp_fx"):
            notes.append(str(message))
            emit("note", text=str(message))
        else:
            show(message, category, *args, **kwargs)

    warnings.showwarning = handler


def _emit_schedule(emit: Emit, model: nn.Module, seq_len: int) -> None:
    """Send the schedule of the warm-up step as it is for the measured ones."""
    import streambp_fx

    schedule = streambp_fx.schedule(model)
    if schedule is not None:
        emit("schedule", text=str(schedule.for_length(seq_len)))


def _own_weights(model: nn.Module) -> None:
    """Copy weights that are still pages of a mapped file, lest the step be charged for reading them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def set_mode(model: nn.Module, spec: StepSpec) -> None:
    """Make `model` train in the way that `spec.mode` names."""
    model.train()
    if spec.mode == "checkpointing":
        checkpoint_layers(model)
    elif spec.mode == "streamed":
        import streambp_fx

        loss_chunk = "auto" if spec.loss_chunk is None else spec.loss_chunk
        streambp_fx.transform(model, **{"chunk": spec.chunk, "loss_chunk": loss_chunk, **spec.options})


def build_step(model: nn.Module, spec: StepSpec) -> TrainingStep:
    """The training step of `model` in the way that `spec.mode` names."""
    set_mode(model, spec)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step


def load_batch(spec: StepSpec, vocab_size: int) -> torch.Tensor:
    """The token ids of the step, int64 (batch_size, seq_len).

    Raises:
        ValueError: the batch file holds another shape.
    """
    shape = (spec.batch_size, spec.seq_len)
    if spec.batch_file is None:
        return random_tokens(vocab_size, spec.batch_size * spec.seq_len, spec.seed).view(shape)
    ids = torch.load(spec.batch_file)
    if tuple(ids.shape) != shape:
        raise ValueError(f"{spec.batch_file} holds ids of shape {tuple(ids.shape)}, the step wants {shape}")
    return ids


def _zero_gradients(model: nn.Module) -> None:
    """Allocate (or clear) the gradient of each trained parameter."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.zero_()


def _save_gradients(model: nn.Module, path: str) -> None:
    torch.save({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, path)


def summary(results: list[tuple[float, Measurement]], what: str) -> dict[str, Any]:
    """The figures of a run from the loss and measurement of each step."""
    measured = [m for _, m in results]
    timed = measured[1:] if what == "both" else measured
    peaks = measured[:1] if what == "both" else measured
    return {
        "seconds": statistics.median(m.seconds for m in timed),
        "peak_bytes": max(m.peak_bytes for m in peaks),
        "losses": [loss for loss, _ in results],
    }


def run(
    spec: StepSpec,
    what: str,
    emit: Emit,
    notes: list[str],
    build: Callable[[nn.Module, Any], TrainingStep] = build_step,
) -> list[tuple[float, Measurement]]:
    """Warm up, then measure; the loss and the measurement of each step."""
    with turn(spec.turn_file):
        model, train_step, ids = _prepared(spec, emit, notes, build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate) if spec.learning_rate else None
    results: list[tuple[float, Measurement]] = []
    for index in range(spec.steps):
        with turn(spec.turn_file):
            _zero_gradients(model)
            losses: list[float] = []
            measured = measure_step(lambda losses=losses: losses.append(train_step(ids)), spec.device)  # type: ignore[misc]
            emit(
                "step", index=index, loss=losses[0], seconds=measured.seconds, peak_bytes=measured.peak_bytes
            )
            results.append((losses[0], measured))
            if index == 0 and spec.gradients_file:
                _save_gradients(model, spec.gradients_file)
            if index == 0 and what == "both":
                use_default_allocator()
            if optimizer is not None:
                optimizer.step()
    return results


def _prepared(
    spec: StepSpec, emit: Emit, notes: list[str], build: Callable[[nn.Module, Any], TrainingStep]
) -> tuple[nn.Module, TrainingStep, torch.Tensor]:
    """The model, its step, which has run once, and the batch."""
    torch.manual_seed(spec.seed)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    loaded = load_model(spec.source, getattr(torch, spec.dtype), seed=spec.seed)
    notes.extend(loaded.notes)
    model = loaded.model.to(spec.device)  # type: ignore[arg-type]
    _own_weights(model)
    train_step = build(model, spec)
    ids = load_batch(spec, loaded.vocab_size).to(spec.device)
    emit("loaded")
    _zero_gradients(model)
    warm = ids[:, : spec.warmup_len or spec.seq_len]
    begun = time.perf_counter()
    loss = train_step(torch.empty(warm.shape, dtype=ids.dtype, device=ids.device).copy_(warm))
    emit("warm", tokens=warm.shape[1], loss=loss, seconds=time.perf_counter() - begun)
    if spec.mode == "streamed":
        _emit_schedule(emit, model, spec.seq_len)
    return model, train_step, ids


def main(
    argv: list[str] | None = None,
    spec_type: type[StepSpec] = StepSpec,
    build: Callable[[nn.Module, Any], TrainingStep] = build_step,
) -> int:
    """Entry point of a worker process; returns the exit status.

    Args:
        argv: `--what` and `--json`; None: those of the process.
        spec_type: of what `--json` holds.
        build: makes the step from the model and the spec.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", required=True, choices=WHATS, help="what the run is for")
    parser.add_argument("--json", required=True, help="the StepSpec, a JSON object")
    args = parser.parse_args(argv)
    spec = spec_type(**json.loads(args.json))
    out = _private_stdout()

    def emit(event: str, **fields: Any) -> None:
        out.write(json.dumps({"event": event, **fields}) + "\n")

    notes: list[str] = []
    _report_warnings(emit, notes)
    results = run(spec, args.what, emit, notes, build)
    emit("done", notes=notes, **summary(results, args.what))
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
