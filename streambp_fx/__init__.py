"""streambp_fx: stream the exact training step of a causal language model, chunk by chunk.

streambp_fx.transform(model, chunk=2000)
model(input_ids=ids, labels=ids).loss.backward()
streambp_fx.restore(model)
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .versions import check_versions

check_versions()

if TYPE_CHECKING:
    from .errors import (
        CaptureError,
        CompileError,
        InputError,
        OffloadError,
        OutputError,
        PlanError,
        RecipeError,
        StreamBPError,
        StreamBPWarning,
        UnknownPassError,
        VerificationError,
    )
    from .explain import explain
    from .options import Options
    from .plan import Plan, plan
    from .schedule import Schedule
    from .show.status import Status
    from .trace import Trace, diff, trace
    from .transform import restore, schedule, status, transform
    from .verify import verify
    from .verifying.result import Verification

__version__ = "0.1.0"
__all__ = [
    "CaptureError",
    "CompileError",
    "InputError",
    "OffloadError",
    "Options",
    "OutputError",
    "Plan",
    "PlanError",
    "RecipeError",
    "Schedule",
    "Status",
    "StreamBPError",
    "StreamBPWarning",
    "Trace",
    "UnknownPassError",
    "Verification",
    "VerificationError",
    "diff",
    "explain",
    "plan",
    "restore",
    "schedule",
    "status",
    "trace",
    "transform",
    "verify",
]

# NOTE [imported when used]: PyTorch and transformers take seconds to import, and `streambp-fx --version` or
# `import streambp_fx` in a program that only may train need neither. So each name comes from its module when
# it is read for the first time.
_HOMES = {
    "Options": "options",
    "Plan": "plan",
    "Schedule": "schedule",
    "Status": "show.status",
    "Trace": "trace",
    "Verification": "verifying.result",
    "diff": "trace",
    "explain": "explain",
    "plan": "plan",
    "restore": "transform",
    "schedule": "transform",
    "status": "transform",
    "trace": "trace",
    "transform": "transform",
    "verify": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Some functions are called as their module, which would take their place when it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
