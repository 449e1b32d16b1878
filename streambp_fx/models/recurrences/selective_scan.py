"""The selective scan: the interface of mamba_ssm's `selective_scan_fn`, for what stands in for it.

The kernel itself takes no state to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dynamo.this_backend import is_traced_for_us
from ...passes.graph.ops.recurrence import RECURRENCE, Recurrence, RunRecurrence
from .interface import Interface, Operands, autocast_dtype, says_more
from .linear_scan import selective_scan


def _scan_step(function: Callable) -> RunRecurrence:
    def step(
        operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return selective_scan(*operands, bool(settings[0]), state)  # type: ignore[arg-type, call-arg]

    return step


def _captured_scan(name: str, original: Callable, ignores: bool) -> Callable:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **rest: Any,
    ) -> Any:
        if not is_traced_for_us() or return_last_state or not ignores or says_more(rest, ignores):
            return original(
                hidden_states,
                dt,
                A,
                B,
                C,
                D=D,
                z=z,
                delta_bias=delta_bias,
                delta_softplus=delta_softplus,
                return_last_state=return_last_state,
                use_mambapy=use_mambapy,
                use_associative_scan=use_associative_scan,
                **rest,
            )
        operands = [hidden_states, dt, A, B, C, D, z, delta_bias]
        return RECURRENCE(name, operands, [float(delta_softplus)], autocast_dtype(hidden_states.device.type))

    return scan


def _scan_recurrence(name: str, step: RunRecurrence) -> Recurrence:
    dims = (2, 2, None, 2, 2, None, 2, None)
    return Recurrence(name, step, dims, rows=2, like=0, state=((0, 0), (0, 1), (2, 1)))


def _scan_trial(rows: int, device: torch.device) -> tuple[Operands, list[float]]:
    draw = lambda *sizes: torch.randn(*sizes, dtype=torch.float32, device=device)  # noqa: E731
    rows_of = [draw(2, 4, rows), draw(2, 4, rows)]
    sides = [draw(2, 3, rows), draw(2, 3, rows)]
    return [*rows_of, -draw(4, 3).exp(), *sides, draw(4), draw(2, 4, rows), draw(4)], [1.0]


def _plain_scan(function: Callable, operands: Operands, settings: list[float]) -> Tensor:
    *first, d, z, bias = operands
    return function(*first, D=d, z=z, delta_bias=bias, delta_softplus=bool(settings[0]))


SELECTIVE_SCAN = Interface(
    _scan_step,
    _captured_scan,
    _scan_recurrence,
    _scan_trial,
    _plain_scan,
    own=True,
)
