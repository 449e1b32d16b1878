"""State spaces: the interface of mamba_ssm's `mamba_chunk_scan_combined`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dynamo.this_backend import is_traced_for_us
from ...passes.graph.ops.recurrence import RECURRENCE, Recurrence, RunRecurrence
from .interface import Interface, Operands, autocast_dtype, is_plain, says_more


def _space_arguments(operands: Sequence[Tensor | None], settings: Sequence[float]) -> dict[str, Any]:
    x, dt, a, b, c, d, bias = operands
    size, softplus, low, high = settings
    named = {"hidden_states": x, "dt": dt, "A": a, "B": b, "C": c, "D": d, "dt_bias": bias}
    return {**named, "chunk_size": int(size), "dt_softplus": bool(softplus), "dt_limit": (low, high)}


def _space_step(function: Callable) -> RunRecurrence:
    ignores = is_plain(function)

    def step(
        operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        named = _space_arguments(operands, settings)
        if ignores:  # rows are added up to whole blocks
            named["chunk_size"] = min(named["chunk_size"], named["hidden_states"].shape[1])
        return function(**named, initial_states=state, return_final_states=True)

    return step


def _captured_space(name: str, original: Callable, ignores: bool) -> Callable:
    def state_space(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **rest: Any,
    ) -> Any:
        if (
            not is_traced_for_us()
            or initial_states is not None
            or return_final_states
            or says_more(rest, ignores)
        ):
            return original(
                hidden_states,
                dt,
                A,
                B,
                C,
                chunk_size=chunk_size,
                D=D,
                dt_bias=dt_bias,
                initial_states=initial_states,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                return_final_states=return_final_states,
                **rest,
            )
        settings = [float(chunk_size), float(dt_softplus), float(dt_limit[0]), float(dt_limit[1])]
        cast = autocast_dtype(hidden_states.device.type)
        return RECURRENCE(name, [hidden_states, dt, A, B, C, D, dt_bias], settings, cast)

    return state_space


def _space_recurrence(name: str, step: RunRecurrence) -> Recurrence:
    dims = (1, 1, None, 1, 1, None, None)
    return Recurrence(name, step, dims, rows=1, like=0, state=((0, 0), (0, 2), (0, 3), (3, 3)))


def _space_trial(rows: int, device: torch.device) -> tuple[Operands, list[float]]:
    draw = lambda *sizes: torch.randn(*sizes, dtype=torch.float32, device=device)  # noqa: E731
    sides = [draw(2, rows, 2, 5), draw(2, rows, 2, 5)]
    operands: Operands = [draw(2, rows, 4, 3), draw(2, rows, 4), -draw(4).exp(), *sides, draw(4), draw(4)]
    return operands, [4.0, 1.0, 0.0, float("inf")]


def _plain_space(function: Callable, operands: Operands, settings: list[float]) -> Tensor:
    return function(**_space_arguments(operands, settings))


STATE_SPACE = Interface(
    _space_step,
    _captured_space,
    _space_recurrence,
    _space_trial,
    _plain_space,
)
