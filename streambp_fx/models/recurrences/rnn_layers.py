"""PyTorch's recurrent layers (`torch.nn.LSTM`, `GRU`, `RNN`), captured as one op each.

Dynamo does not trace them. A chunk calls the same function of PyTorch, from the state that the chunk before
has left. Layers that go both ways, project their state, or drop values between one another are left to eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...dynamo.loops import stand_in
from ...passes.graph.ops.recurrence import RECURRENCE, RECURRENCE_LAST, RECURRENCES, Recurrence
from ...passes.s1_capture.loops.body import packed, unpacked
from .interface import autocast_dtype

REFUSED = "recurrent layers that go both ways, project, drop values between one another, or take no batch"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@dataclass(frozen=True)
class Layers:
    """Layers of one kind.

    Attributes:
        mode: a key of `FUNCTIONS`.
        has_biases: each layer has two vectors besides its matrices.
        count: of layers.
        batch_first: the rows are in dim 1 and not in dim 0.
        train: they are in training mode.
    """

    mode: str
    has_biases: bool
    count: int
    batch_first: bool
    train: bool

    @property
    def states(self) -> int:
        """How many values go from row to row."""
        return 2 if self.mode == "LSTM" else 1

    def step(
        self, operands: Sequence[Any], settings: Sequence[float], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layers on the rows that are given, (B, T, width) or (T, B, width), as `Recurrence.step`."""
        rows, begin, weights = operands[0], operands[1 : 1 + self.states], operands[1 + self.states :]
        before = begin if state is None else unpacked(state, begin)
        flags = (self.has_biases, self.count, 0.0, self.train, False, self.batch_first)
        function = FUNCTIONS[self.mode]
        first = tuple(before) if self.mode == "LSTM" else before[0]
        made, *last = function(rows, first, list(weights), *flags)
        return made, packed(last)

    def sizes(self, operands: Sequence[Any]) -> list[Any]:
        """Those of the rows that they make."""
        return [*operands[0].shape[:-1], operands[1].shape[-1]]

    def state_sizes(self, operands: Sequence[Any]) -> list[Any]:
        """Those of the state, see NOTE [the state of a loop]."""
        return [1 + sum(x.numel() for x in operands[1 : 1 + self.states])]


@torch._dynamo.assume_constant_result
def name_of(mode: str, has_biases: bool, count: int, batch_first: bool, train: bool, operands: int) -> str:
    """The name under which the op `recurrence` calls such layers, with so many operands, from now on."""
    layers = Layers(mode, has_biases, count, batch_first, train)
    name, dim = f"torch.nn.{layers}", 1 if batch_first else 0
    dims = (dim, *(None for _ in range(operands - 1)))
    more: dict[str, Any] = {"sizes": layers.sizes, "state_sizes": layers.state_sizes, "by_row": True}
    RECURRENCES.setdefault(name, Recurrence(name, layers.step, dims, rows=dim, like=0, **more))
    return name


def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """What the layers return: the rows, and the state after the last one; traced in the place of theirs.

    Args:
        self: the layers.
        input: (B, T, width), or (T, B, width).
        hx: the state before the first row, (layers, B, hidden), two for an LSTM; None: zeros.
    """
    if not _is_step(self, input, hx):
        torch._dynamo.graph_break(REFUSED)
    if hx is None:
        samples = input.shape[0 if self.batch_first else 1]
        zeros = torch.zeros(
            self.num_layers, samples, self.hidden_size, dtype=input.dtype, device=input.device
        )
        states = [zeros, zeros] if self.mode == "LSTM" else [zeros]
    else:
        states = list(hx) if self.mode == "LSTM" else [hx]
    # as they are now: a parametrisation, or whoever puts others in their place, goes past the flat list
    operands = [input, *states, *(getattr(self, name) for name in self._flat_weights_names)]
    name = name_of(self.mode, self.bias, self.num_layers, self.batch_first, self.training, len(operands))
    cast = autocast_dtype(input.device.type)
    rows = RECURRENCE(name, operands, [], cast)
    last, size = RECURRENCE_LAST(name, operands, [], cast), states[0].numel()
    ends = [last.narrow(0, 1 + k * size, size).view(states[0].shape) for k in range(len(states))]
    return rows, (tuple(ends) if self.mode == "LSTM" else ends[0])


def _is_step(layers: nn.RNNBase, input: Any, hx: Any) -> bool:
    drops = layers.dropout and layers.training and layers.num_layers > 1
    if layers.bidirectional or layers.proj_size or drops:
        return False
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    return all(isinstance(x, Tensor) and x.dim() == 3 for x in (input, *states))


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    stand_in(kind.forward, forward)
