"""Functions that Dynamo gives up: it compiles nothing of them, and calls no backend that could say so."""

from __future__ import annotations

import sys
import warnings
from types import CodeType, FrameType
from typing import Any

from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import Unsupported

from ..errors import StreamBPWarning
from .messages import reason_and_line
from .this_backend import is_ours


class _Callbacks(list[Any]):
    """Of the end of a compilation: `torch._dynamo.reset()` clears them, but for ours."""

    def clear(self) -> None:
        super().clear()
        self.append(_ended)


def warn_of_skipped_frames() -> None:
    """From now on a warning says so.

    NOTE [graphs that end within a loop]: where a graph ends within a `for` or `while`, Dynamo hands over
    neither what comes before nor what comes behind: the whole function runs as it is, and nothing is logged.
    """
    if not isinstance(callback_handler.end_callbacks, _Callbacks):
        callback_handler.end_callbacks = _Callbacks([*callback_handler.end_callbacks, _ended])


def _ended(given: CallbackArgs) -> None:
    """Dynamo has ended with a frame; the error is that with which it gives it up, if it does.

    Frames with nothing to compile are given up with another error: those are no news.
    """
    error = sys.exc_info()[1]
    if isinstance(error, Unsupported) and error.skip_frame:
        code = _code_for_us(sys._getframe())
        if code is not None:
            _warn(code, error)


def _code_for_us(frame: FrameType | None) -> CodeType | None:
    """The function that is compiled, if it is for this backend and may consist of several graphs."""
    while frame is not None:
        own: dict[str, Any] = frame.f_locals
        if frame.f_code.co_name == "_compile" and "compiler_fn" in own:
            code = own.get("code")
            ours = isinstance(code, CodeType) and is_ours(own["compiler_fn"])
            return code if ours and not own.get("one_graph") else None
        frame = frame.f_back
    return None


def _warn(code: CodeType, error: BaseException) -> None:
    reason, where = reason_and_line(error)
    name = getattr(code, "co_qualname", code.co_name)
    warnings.warn(
        f"{name} runs unstreamed: a graph of it ends where Dynamo cannot go on, as within a loop, so Dynamo "
        "compiles nothing of the function, but for other functions that it calls.\n"
        f"{reason}\nThe line is:\n  {where}\n"
        "Rewrite that line, or move it out of the loop. With fullgraph=True this is an error",
        StreamBPWarning,
        stacklevel=2,
    )
