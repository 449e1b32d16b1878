"""The errors and the warning a user can meet. Each says what was wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar


class StreamBPError(RuntimeError):
    """Base of the errors raised by this package while it compiles or runs a model."""


class CaptureError(StreamBPError):
    """The model is not a causal language model, or its forward could not be captured as one graph."""


class CompileError(StreamBPError):
    """A pass of the compiler failed. The message names the pass and, if there is one, the graph node."""


class InputError(StreamBPError, ValueError):
    """A step that cannot be run with these weights or on this batch; the message says why."""


class VerificationError(StreamBPError):
    """A model or a batch that cannot be verified. The message says what is missing or in the way."""


class PlanError(StreamBPError, ValueError):
    """A plan that cannot be made: an unknown model, a unit that is none, a budget below one chunk."""


class RecipeError(StreamBPError, ValueError):
    """A recipe that cannot be run: an unknown name, or a package, model or file that is missing or unfit."""


class UnknownPassError(StreamBPError, ValueError):
    """A name that no pass has. The message lists the names there are, and the nearest one."""


class OutputError(StreamBPError, ValueError):
    """A page or a picture that cannot be written: no such folder, an unknown format, a missing package."""


class OffloadError(StreamBPError):
    """Tensors cannot be moved to host memory or disk, or do not come back: no room, or an older PyTorch."""


class StreamBPWarning(UserWarning):
    """Some region of the model runs unchunked. The gradient is exact; the memory saving is smaller."""


# Between a line of the user's and a warning: this project, and what calls models.
_PACKAGES = (__name__.split(".")[0], "torch", "transformers", "accelerate", "peft", "trl")
_CALLERS = {*_PACKAGES, "contextlib", "functools"}


_held: ContextVar[list[str] | None] = ContextVar("held_warnings", default=None)


@contextlib.contextmanager
def held_warnings() -> Iterator[list[str]]:
    """Within: what `warn` is to say is put into this list, and nothing is said."""
    held: list[str] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def warn(text: str) -> None:
    """Give a `StreamBPWarning` at the line of the user's that led to it, such as `trainer.train()`."""
    held = _held.get()
    if held is not None:
        held.append(text)
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _CALLERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, StreamBPWarning, stacklevel=level)
