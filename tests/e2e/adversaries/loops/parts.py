"""What the models of loops are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from e2e_adversary import STREAMED, Cases
from e2e_subject import WIDTH
from torch import Tensor, nn

CASES = Cases("loops")


class Counts(nn.Module):
    """Numbers that are others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def next(self) -> int:
        self.asked += 1
        return self.asked


class Remembers(nn.Module):
    """A cell that leaves something behind when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        self.last = torch.tanh(self.lin(x) + h)
        return self.last


class Layer(nn.Module):
    """A recurrence in a method of its own, as models have it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def run(self, gate: Tensor, value: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = torch.zeros(gate[:, 0].shape, dtype=gate.dtype)
        out = torch.zeros_like(value)
        for t in range(value.shape[1]):
            state = gate[:, t] * state
            state = state + value[:, t]
            out[:, t] = state
        return out, state

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.gate(x).sigmoid(), self.value(x))[0]


def with_other_weights(layers: nn.GRU) -> nn.GRU:
    """Put another parameter in the place of one, so that the layers do not hear of it."""
    layers._parameters["weight_hh_l0"] = nn.Parameter(layers.weight_hh_l0.detach() * 2)
    return layers


def parts() -> dict[str, Any]:
    return {
        "cell": nn.GRUCell(WIDTH, WIDTH), "long": nn.LSTMCell(WIDTH, WIDTH), "layer": Layer(),
        "counts": Counts(), "first": nn.Parameter(torch.randn(WIDTH)), "remembers": Remembers(),
        "seen": torch.zeros(WIDTH),
        "decay": nn.Parameter(torch.rand(WIDTH)), "lstm": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
        "gru": nn.GRU(WIDTH, WIDTH), "rnn": nn.RNN(WIDTH, WIDTH, nonlinearity="relu", bias=False),
        "turned": with_other_weights(nn.GRU(WIDTH, WIDTH, batch_first=True)),
        "narrow": nn.GRU(4, 4, batch_first=True),
        "both": nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
        "small": nn.LSTM(WIDTH, WIDTH + 4, proj_size=WIDTH, batch_first=True),
    }  # fmt: skip


def block(want: Any = STREAMED, **more: Any) -> Callable[..., Any]:
    return CASES.block(want, parts=parts, **more)
