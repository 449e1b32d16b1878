"""Functions that Dynamo leaves as they are because a dispatch mode is active: it calls no backend then."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, any_torch_dispatch_mode_on_stack

from ..errors import StreamBPWarning
from .this_backend import is_ours


def warn_where_a_mode_is_active() -> None:
    """From now on a warning says so, once for each call of `torch.compile`.

    NOTE [steps within a dispatch mode]: Dynamo does not try such a function again in later steps, outside of
    the mode, nor does it run what it had compiled for it before.
    """
    original = CatchErrorsWrapper.__call__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def call(self: CatchErrorsWrapper, frame: Any, *state: Any) -> Any:
        found = original(self, frame, *state)
        left = found.guarded_code is None and any_torch_dispatch_mode_on_stack()
        said = not left or hasattr(self, "streambp_said")
        if not said and is_ours(self) and not trace_rules.check(frame.f_code):
            self.streambp_said = True  # type: ignore[attr-defined]
            _warn()
        return found

    CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign, assignment]


def _warn() -> None:
    modes = [type(m) for m in _get_current_dispatch_mode_stack() if not m.is_infra_mode()]
    names = ", ".join(f"{m.__module__}.{m.__qualname__}" for m in modes)
    warnings.warn(
        f"this step runs unstreamed: {names} is active, and Dynamo compiles nothing within a dispatch mode. "
        "It does not try the function again in later steps: leave the mode, call torch._dynamo.reset(). "
        "streambp_fx.transform(model) streams within modes that only observe",
        StreamBPWarning,
        stacklevel=2,
    )
