"""A small model of recurrences, as parts of a step."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

import streambp_fx
from streambp_fx.passes.s6_schedule.step_parts import StepParts

WIDTH, STATES = 4, 3


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(WIDTH, WIDTH + 2 * STATES)
        self.decay, self.skip = nn.Parameter(torch.rand(WIDTH, STATES)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        steps, into, out = self.made(x).transpose(1, 2).split([WIDTH, STATES, STATES], 1)
        given = (x.transpose(1, 2), steps, -self.decay.exp(), into, out, self.skip)
        return x + F.silu(mamba_selective_scan(*given).transpose(1, 2))


class Recurrent(nn.Module):
    """Layers of one recurrence each, and a loss."""

    def __init__(self, layers: int, trained: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.layers = nn.ModuleList(Recurrence() for _ in range(layers))
        self.layers[0].requires_grad_(trained)
        self.embed.requires_grad_(trained)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


@functools.cache
def recurrent(layers: int = 1, trained: bool = True) -> StepParts:
    """The parts of a step, once it has run; of `trained` False the first layer is frozen."""
    torch.manual_seed(0)
    model = Recurrent(layers, trained)
    streambp_fx.transform(model, chunk=4, loss_chunk=4, check="never")
    ids = torch.arange(26).view(2, 13) % 7
    model(input_ids=ids).backward()
    found = streambp_fx.schedule(model)
    assert found is not None
    return found.cost.executor.parts
