"""Gated delta rules: the interface of fla's `chunk_gated_delta_rule` and `chunk_kda`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dynamo.this_backend import is_traced_for_us
from ...passes.graph.ops.recurrence import RECURRENCE, Recurrence, RunRecurrence
from .interface import Interface, Operands, autocast_dtype, is_plain, says_more


def _delta_step(function: Callable) -> RunRecurrence:
    ignores = is_plain(function)

    def step(
        operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta = operands
        size = int(settings[0])
        return function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=min(size, query.shape[1]) if ignores else size,  # type: ignore[union-attr]
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=bool(settings[1]),
        )

    return step


def _captured_delta(name: str, original: Callable, ignores: bool) -> Callable:
    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if (
            not is_traced_for_us()
            or initial_state is not None
            or output_final_state
            or says_more(rest, ignores)
        ):
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                chunk_size=chunk_size,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **rest,
            )
        settings = [float(chunk_size), float(use_qk_l2norm_in_kernel)]
        cast = autocast_dtype(query.device.type)
        return RECURRENCE(name, [query, key, value, g, beta], settings, cast), None

    return delta_rule


def _delta_recurrence(name: str, step: RunRecurrence) -> Recurrence:
    state = ((2, 0), (2, 2), (1, 3), (2, 3))
    return Recurrence(name, step, dims=(1,) * 5, rows=1, like=2, state=state)


def _delta_trial(each: int) -> Callable[[int, torch.device], tuple[Operands, list[float]]]:
    """`each`: numbers of decay for a head; 0: one without a dim."""

    def trial(rows: int, device: torch.device) -> tuple[Operands, list[float]]:
        draw = lambda *sizes: torch.randn(2, rows, *sizes, dtype=torch.float32, device=device)  # noqa: E731
        g = -draw(2, *([each] if each else [])).abs()
        return [draw(2, 3), draw(2, 3), draw(2, 5), g, draw(2).sigmoid()], [4.0, 1.0]

    return trial


def _plain_delta(function: Callable, operands: Operands, settings: list[float]) -> Tensor:
    query, key, value, g, beta = operands
    size, flag = int(settings[0]), bool(settings[1])
    made, last = function(query, key, value, g=g, beta=beta, chunk_size=size, use_qk_l2norm_in_kernel=flag)
    if last is not None:
        raise ValueError("it returns a state that nobody asked for")
    return made


def delta_rule(each: int) -> Interface:
    """The interface, tried with so many numbers of decay for a head; 0: with one that has no dim."""
    return Interface(
        _delta_step,
        _captured_delta,
        _delta_recurrence,
        _delta_trial(each),
        _plain_delta,
    )
