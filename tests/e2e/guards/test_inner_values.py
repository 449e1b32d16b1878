"""The gradient of a value inside of a layer that the model returns as well is as in eager."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from streambp_fx import StreamBPWarning

VOCAB, WIDTH = 19, 12


class Attention(nn.Module):
    """One layer by hand that also returns one of the values it is made of."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.query, self.returned = nn.Linear(WIDTH, WIDTH), returned

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        query = self.query(x)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        scores = query @ x.mT
        gate = x.sigmoid()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        x = x + weights @ x * gate
        values = {"query": query, "scores": scores, "gate": gate, "weights": weights}
        values |= {"copy": x.to(x.dtype, copy=True)}
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()), values[self.returned]


@pytest.mark.parametrize(
    ("returned", "streamed"),
    [("query", True), ("scores", False), ("gate", False), ("weights", False), ("copy", True)],
)
def test_gradients_of_values_inside_of_attention(returned: str, streamed: bool) -> None:
    torch.manual_seed(0)
    model = Attention(returned).double()
    ids = torch.randint(0, VOCAB, (2, 33))
    loss, value = model(ids)
    (want,) = torch.autograd.grad(loss, value, allow_unused=True)
    call = torch.compile(model, backend="streambp", options={"chunk": 8, "check": "never"})
    said = contextlib.nullcontext() if streamed else pytest.warns(StreamBPWarning, match="cannot be cut")
    with said:
        loss, value = call(ids)
    (got,) = torch.autograd.grad(loss, value, allow_unused=True)
    assert (got is None) == (want is None) == (returned == "copy")
    if got is not None:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
