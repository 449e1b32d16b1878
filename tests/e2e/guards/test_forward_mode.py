"""Forward-mode differentiation around a step: the step runs unstreamed, with its tangents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import sample
from torch import Tensor, nn
from torch.autograd import forward_ad

import streambp_fx
from streambp_fx import StreamBPWarning, status

VOCAB, WIDTH, ROWS = 31, 16, 37
OPTIONS: dict[str, Any] = {"chunk": 8, "loss_chunk": 8}


class Weighted(nn.Module):
    """Attention by hand, which PyTorch can differentiate forwards; each token has a weight in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.query(x) @ x.mT * 0.3
        x = x + self.out(scores.masked_fill(later, float("-inf")).softmax(-1) @ x)
        return (F.cross_entropy(self.head(x).mT, input_ids, reduction="none") * weights).sum()


def call_of(model: nn.Module, door: str) -> Any:
    torch._dynamo.reset()
    if door == "compile":
        return torch.compile(model, backend="streambp", options=OPTIONS)
    return streambp_fx.transform(model, seq_dim={"input_ids": 1, "weights": 1}, **OPTIONS)


@pytest.mark.parametrize("after_a_step", sample([False, True], True))
@pytest.mark.parametrize("of", ["an input", "a weight"])
@pytest.mark.parametrize("door", ["compile", "transform"])
def test_tangents_are_those_of_eager(door: str, of: str, after_a_step: bool) -> None:
    torch.manual_seed(0)
    model = Weighted().double()
    ids = torch.randint(0, VOCAB, (2, ROWS))
    weights = torch.rand(2, ROWS, dtype=torch.float64)

    def tangent(call: Any) -> Tensor:
        with forward_ad.dual_level():
            if of == "an input":
                given, own = forward_ad.make_dual(weights, weights.sin()), {}
            else:
                name, weight = "query.weight", model.query.weight.detach()
                name = f"_orig_mod.{name}" if hasattr(call, "_orig_mod") else name
                given, own = weights, {name: forward_ad.make_dual(weight, weight.cos())}
            out = torch.func.functional_call(call, own, (ids, given)) if own else call(ids, given)
            return forward_ad.unpack_dual(out).tangent

    expected = tangent(model)
    call = call_of(model, door)
    if after_a_step:
        call(ids, weights).backward()
        assert status(model).streamed
    # from 2.14 on Dynamo itself refuses some of them
    message = "carries no tangents: it runs unstreamed|Attempted to wrap a dual tensor"
    with pytest.warns(StreamBPWarning, match=message):
        found = tangent(call)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
