"""What Dynamo says while it captures: calls that are for a log only, and its errors in plain words."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn


def _loggers() -> list[Any]:
    import transformers

    kind = type(transformers.utils.logging.get_logger("transformers"))
    names = ("warning_once", "warning_advice", "info_once", "warning", "info", "debug")
    found = [getattr(kind, n) for n in names if hasattr(kind, n)]
    return [*found, *(getattr(logging.Logger, n) for n in ("warning", "info", "debug"))]


LOGGERS = _loggers()


def reason_and_line(error: BaseException) -> tuple[str, str]:
    """Dynamo's reason without its logs, and the line of the source where it stopped."""
    text = str(error).split("Developer debug context")[0].split("Set TORCH")[0]
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    code = [k for k, line in enumerate(lines) if line.strip().startswith("File ")]
    where = "\n".join(lines[code[-1] : code[-1] + 2]) if code else ""
    stack = getattr(error, "real_stack", None)
    if stack:
        frame = stack[-1]
        where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
    return "\n".join(line for line in lines[:12] if "from user code" not in line)[:1500], where


def in_plain_words(model: nn.Module, error: BaseException) -> str:
    """An error of a model that Dynamo could not capture, with the line of the model's source."""
    reason, where = reason_and_line(error)
    return (
        f"the forward of {type(model).__name__} could not be captured as one graph.\n{reason}\n"
        f"The line of the model is:\n  {where}\n"
        "Rewrite that line so that it does not depend on the values of tensors and calls nothing outside "
        "PyTorch, or train the model unstreamed: streambp_fx.restore(model)."
    )


SKIPPED = (
    "torch.compile, which hands over the training step as a graph, has skipped the model's forward: such "
    "steps run unstreamed. TORCH_LOGS=dynamo may say why"
)


def switched_off() -> str | None:
    """Why PyTorch hands over no graphs at all in this process, or for now; None if it does."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        by = "the environment variable TORCHDYNAMO_DISABLE"
    elif torch._dynamo.config.disable:
        by = "TORCH_COMPILE_DISABLE or torch._dynamo.config.disable"
    elif getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "") == "force_eager":
        by = 'torch.compiler.set_stance("force_eager")'
    else:
        return None
    return (
        f"torch.compile, which hands over the training step as a graph, is switched off by {by}: such steps "
        "run unstreamed. Switch it on"
    )
