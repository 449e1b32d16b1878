"""Biases that are inputs may together lift what a mask hides: the step then reads all rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, ROWS = 19, 12, 33
LOWEST = torch.finfo(torch.float64).min


class Biased(nn.Module):
    """Attention by hand: later columns get the lowest number, then biases by column are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, *biases: Tensor) -> Tensor:
        x = self.embed(ids)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        scores = (self.query(x) @ x.mT).masked_fill(later, LOWEST)
        for bias in biases:
            scores = scores + bias
        x = x + scores.softmax(-1) @ x
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("count", [1, 4])
def test_biases_that_lift_what_is_hidden(count: int) -> None:
    torch.manual_seed(0)
    model = Biased().double()
    streamed = copy.deepcopy(model)
    call = torch.compile(streamed, backend="streambp", options={"chunk": 8, "on_error": "raise"})
    ids = torch.randint(0, VOCAB, (2, ROWS))
    side = torch.where(torch.arange(ROWS) < 20, -1.0, 1.0).double().expand(2, 1, ROWS)
    for size in (0.0, 0.2449 * -LOWEST):
        biases = [side * size * (1 - k / 1000) for k in range(count)]
        for one, step in ((model, model), (streamed, call)):
            one.zero_grad()
            step(ids, *biases).backward()
        for got, want in zip(streamed.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12)
