"""What Dynamo says while it captures: calls that are for a log only, and its errors in plain words."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ..errors import StreamBPError
from ..passes.graph.sources import source_name
from ..versions.differences import ending_checkpoints

INTEGERS = (torch.int64, torch.int32)


def _loggers() -> list[Any]:
    import transformers

    kind = type(transformers.utils.logging.get_logger("transformers"))
    names = ("warning_once", "warning_advice", "info_once", "warning", "info", "debug")
    found = [getattr(kind, n) for n in names if hasattr(kind, n)]
    return [*found, *(getattr(logging.Logger, n) for n in ("warning", "info", "debug"))]


LOGGERS = _loggers()


def reason_and_line(error: BaseException) -> tuple[str, str]:
    """Dynamo's reason without its logs, and the line of the source where it stopped."""
    text, _, stack_of_user = str(error).partition("User Stack (most recent call last):")
    text = re.split("Developer debug context|Set TORCH|For more information, run with TORCH_LOGS", text)[0]
    lines, placed = (
        [line.rstrip() for line in t.splitlines() if line.strip()] for t in (text, stack_of_user or text)
    )
    code = [k for k, line in enumerate(placed) if line.strip().startswith("File ")]
    where = "\n".join(placed[code[-1] : code[-1] + 2]) if code else ""
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


def with_ranges(module: GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a graph, such that an error of a kernel gets a note of the values of the graph's integers.

    Args:
        module: the Dynamo graph.
        run: takes its inputs.
    """
    names = [source_name(n) for n in module.graph.nodes if n.op == "placeholder"]

    @functools.wraps(run, updated=())
    def noted(*inputs: Any) -> Any:
        try:
            with ending_checkpoints():
                return run(*inputs)
        except (IndexError, RuntimeError) as error:
            if not isinstance(error, (StreamBPError, torch.OutOfMemoryError)):
                add_note(error, _ranges(names, inputs))
            raise

    return noted


def _ranges(names: Sequence[str], inputs: Sequence[Any]) -> str:
    found = []
    for name, value in zip(names, inputs, strict=True):
        if not isinstance(value, Tensor) or value.dtype not in INTEGERS or value.numel() == 0:
            continue
        try:
            least, most = (int(v) for v in value.aminmax())
        except RuntimeError:
            return ""  # the device cannot be asked any more
        found.append(f"{name} from {least} to {most}")
    return f"streambp_fx: the values of the inputs are {', '.join(found)}" if found else ""


def add_note(error: Exception, note: str) -> None:
    """Add lines to what is printed of an error."""
    if not note:
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)


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
