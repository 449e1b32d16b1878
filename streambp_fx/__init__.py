"""streambp_fx: stream the exact training step of a causal language model, chunk by chunk.

streambp_fx.transform(model, chunk=2000)
model(input_ids=ids, labels=ids).loss.backward()
streambp_fx.restore(model)
"""

from .versions import check_versions

check_versions()

from .errors import (  # noqa: E402
    CaptureError,
    CompileError,
    InputError,
    OffloadError,
    OutputError,
    PlanError,
    StreamBPError,
    StreamBPWarning,
    UnknownPassError,
    VerificationError,
)
from .explain import explain  # noqa: E402
from .options import Options  # noqa: E402
from .plan import Plan, plan  # noqa: E402
from .schedule import Schedule  # noqa: E402
from .show.status import Status  # noqa: E402
from .trace import Trace, diff, trace  # noqa: E402
from .transform import restore, schedule, status, transform  # noqa: E402
from .verify import verify  # noqa: E402
from .verifying.result import Verification  # noqa: E402

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
