"""Live tensor bytes of steps, also of compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streambp_fx.backend import CompiledGraph
from streambp_fx.report.live import LiveBytes


def measure_compiled(monkeypatch: Any, loss: Callable[[], torch.Tensor], known: Any = ()) -> LiveBytes:
    """The same for a compiled step: Dynamo refuses dispatch modes, so only what runs is under the meter."""
    meter = LiveBytes(known)
    real = CompiledGraph.__call__

    def metered(self: Any, *inputs: Any) -> Any:
        with meter:
            return real(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledGraph, "__call__", metered)
        value = loss()
    with meter:
        value.backward()
    return meter


def measure(run: Callable[[], Any], known: Any = ()) -> LiveBytes:
    with LiveBytes(known) as meter:
        run()
    return meter
