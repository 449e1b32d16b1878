"""Compiles what Dynamo hands over: the one door that `transform` and `torch.compile` share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import CompileError, StreamBPWarning
from .options import Options
from .passes import PassError, analyze
from .passes.axes import is_secondary
from .passes.capture import source_line
from .passes.ir import Facts, shape_of, tensors_of
from .passes.normalize import MutationError
from .runtime.executor import Executor
from .schedule import Schedule

FALL_BACK = "Call streambp_fx.restore(model) to train it unstreamed, and please report this."


def compile_graph(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Callable[[Schedule], None] | None = None,
) -> Callable[..., Any]:
    """A callable that runs the graph streamed.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        options: how to stream.
        report: called with the schedule.

    Raises:
        CompileError: a pass failed.
    """
    try:
        facts = analyze(module, example_inputs, one_length=True)
    except PassError as error:
        if isinstance(error.cause, MutationError):
            line = source_line(error.cause.node)
            _warn(f"the model runs unstreamed: {error.cause} ({line})")
            return module
        raise CompileError(f"{error}. {FALL_BACK}") from error
    if facts.sequence is None or not facts.segments:
        if report is not None:
            report(Schedule(facts, options))
        if _is_long(facts):
            _warn("the model runs unstreamed: its inputs have no size that stands for the sequence length")
        return module
    schedule = Schedule(facts, options)
    if report is not None:
        report(schedule)
    _warn_unchunked(facts)
    try:
        return Executor(facts, options.rows, options.loss_chunk)
    except Exception as error:
        raise CompileError(f"the schedule could not be built: {error}. {FALL_BACK}") from error


def _is_long(facts: Facts) -> bool:
    """False for a sequence of one token, which Dynamo takes as a constant and which needs no streaming."""
    inputs = [n for n in facts.nodes if n.op == "placeholder" and n not in facts.parameters and tensors_of(n)]
    return any(s != 1 for n in inputs for s in shape_of(n)[1:2])


def _warn_unchunked(facts: Facts) -> None:
    """One warning for all regions that run whole, with the op, its source line and the cost."""
    lines = []
    for segment in facts.segments:
        if segment.chunked or segment.refused is None or is_secondary(segment.reason or ""):
            continue
        lines.append(f"{segment.refused.target}: {segment.reason} ({source_line(segment.refused)})")
    if lines:
        unique = list(dict.fromkeys(lines))
        _warn(
            f"{len(lines)} of {len(facts.segments)} segments run unchunked. Their gradients are exact, but "
            "their activations are held for the whole sequence while they are recomputed:\n  "
            + "\n  ".join(unique)
        )


def _warn(text: str) -> None:
    warnings.warn(text, StreamBPWarning, stacklevel=3)
