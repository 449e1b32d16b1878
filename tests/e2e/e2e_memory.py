"""Live tensor bytes of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streambp_fx.report.live import LiveBytes


def measure(run: Callable[[], Any], known: Any = ()) -> LiveBytes:
    with LiveBytes(known) as meter:
        run()
    return meter
