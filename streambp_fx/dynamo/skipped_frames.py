"""Functions that Dynamo gives up: it compiles nothing of them, and calls no backend that could say so."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import Unsupported
from torch._dynamo.types import FrameAction
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack
from torch.utils._pytree import tree_leaves

from ..errors import warn
from ..runtime.segments.dispatch_modes import active_modes
from ..runtime.step_counts import StepCounts, counts_of
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


def warn_of_mode(compiler: CatchErrorsWrapper) -> None:
    """If a dispatch mode is active, so that a function is not compiled: a warning, once a `torch.compile`.

    NOTE [steps within a dispatch mode]: Dynamo compiles nothing there. It does not try such a function again
    in later steps, outside of the mode, nor does it run what it had compiled for it before.
    """
    if hasattr(compiler, "streambp_said") or not any_torch_dispatch_mode_on_stack():
        return
    compiler.streambp_said = True  # type: ignore[attr-defined]
    names = ", ".join(name for name, _ in active_modes())
    warn(
        f"this step runs unstreamed: {names} is active, and Dynamo compiles nothing within a dispatch mode. "
        "It does not try the function again in later steps: leave the mode, call torch._dynamo.reset(). "
        "streambp_fx.transform(model) streams within modes that only observe"
    )


def warn_of_limit(found: Any, frame: Any, limit: int) -> None:
    """A warning if Dynamo compiles no more graphs of a function. It asks no more about it then.

    Args:
        found: what became of the frame.
        frame: the call of the function.
        limit: how many graphs there may be.
    """
    if found.frame_exec_strategy.cur_action != FrameAction.RUN_ONLY:
        return
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    why = (
        f"{name} has {limit} graphs, each for other values of its arguments or of what it reads, and Dynamo "
        "compiles no more: this step and later ones that fit none of them run unstreamed, and the later ones "
        'are not counted. TORCH_LOGS="recompiles" says what differs each time'
    )
    for counts in counts_of_call(frame):
        counts.note(why)
    warn(why)


def counts_of_call(frame: Any) -> list[StepCounts]:
    """What the steps of the first module among a function's variables are counted in; at most one."""
    modules = (v for v in tree_leaves(dict(frame.f_locals)) if isinstance(v, nn.Module))
    return next((counts_of(m) for m in modules), [])[:1]


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


#: At which lines functions end that a warning was about. Code that Dynamo has made may have no hash.
_said: dict[tuple[str, int, str], set[str]] = {}
#: They are code of their own up to Python 3.11, and run where the function around them runs.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _warn(code: CodeType, error: BaseException) -> None:
    """A warning, unless it was said of a function that is running and calls this one."""
    reason, where = reason_and_line(error)
    frame: FrameType | None = sys._getframe()
    while frame is not None and where not in _said.get(_place(frame.f_code), ()):
        frame = frame.f_back
    if frame is not None or code.co_name in COMPREHENSIONS:
        return
    _said.setdefault(_place(code), set()).add(where)
    name = getattr(code, "co_qualname", code.co_name)
    warn(
        f"{name} runs unstreamed: a graph of it ends where Dynamo cannot go on, as within a loop, so Dynamo "
        "compiles nothing of the function, but for other functions that it calls.\n"
        f"{reason}\nThe line is:\n  {where}\n"
        "Rewrite that line, or move it out of the loop. With fullgraph=True this is an error"
    )
