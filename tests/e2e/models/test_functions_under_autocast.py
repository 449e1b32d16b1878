"""Autograd functions of a model under autocast: their ops see it in the forward, as they do in eager."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import through
from e2e_models import sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx import StreamBPWarning

IDS = torch.arange(2 * 33).reshape(2, 33) * 7 % 50
custom_fwd, custom_bwd = torch.amp.custom_fwd, torch.amp.custom_bwd


def multiply(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
    ctx.save_for_backward(x, w)
    return x @ w


class Product(torch.autograd.Function):
    """A product with a weight, as people write it who know autocast."""

    forward = staticmethod(custom_fwd(multiply, device_type="cpu"))

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class InFloat32(Product):
    """The same, which is computed in float32."""

    forward = staticmethod(custom_fwd(multiply, device_type="cpu", cast_inputs=torch.float32))


class Unaware(torch.autograd.Function):
    """The same, by somebody who does not think of autocast but casts what he is given."""

    forward = staticmethod(multiply)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = gradient.float()
        return (g @ w.t()).to(x.dtype), x.float().flatten(0, -2).t() @ g.flatten(0, -2)


class OfRows(torch.autograd.Function):
    """Scores of a row's own entries: products within, and no weight."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1))
        ctx.save_for_backward(heads)
        return (heads @ heads.transpose(-1, -2) @ heads).flatten(-2).to(torch.float32)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (heads,) = ctx.saved_tensors
        g = gradient.to(heads.dtype).unflatten(-1, (4, -1))
        scores, back = heads @ heads.transpose(-1, -2), g @ heads.transpose(-1, -2)
        made = scores.transpose(-1, -2) @ g + back @ heads + back.transpose(-1, -2) @ heads
        return made.flatten(-2), None


class Model(nn.Module):
    """Attention, the function, a head."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.embed, self.qkv, self.head = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.function.apply(x, self.weight)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), input_ids.flatten())


FUNCTIONS = {f.__name__: f for f in (Product, InFloat32, Unaware, OfRows)}
#: All of the step under autocast, or the model alone, as trainers have it.
AROUND = ("forward", "forward and backward")
CASES = [(f, door, a) for f in FUNCTIONS for door in ("transform", "compile") for a in AROUND]


@pytest.mark.parametrize(
    ("function", "door", "around"),
    sample(CASES, ("Product", "compile", "forward"), ("OfRows", "transform", "forward")),
)
def test_functions_see_autocast(function: str, door: str, around: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(FUNCTIONS[function])
    eager = copy.deepcopy(model)
    call = through(door, model)

    def step(of: nn.Module, run: Any, length: int) -> Tensor:
        of.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(input_ids=IDS[:, :length])
            if around != "forward":
                loss.backward()
        if around == "forward":
            loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in (33, 21):
            want, got = step(eager, eager, length), step(model, call, length)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
            for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
                if p.grad is None:
                    assert q.grad is None, name
                else:
                    assert (q.grad - p.grad).norm() < 0.02 * p.grad.norm(), name
    texts = [str(w.message) for w in said if issubclass(w.category, StreamBPWarning)]
    makes_a_weight = function != "OfRows"
    assert all("makes the gradient of a weight" in text for text in texts)
    assert bool(texts) == makes_a_weight
    unchunked = [s for s in streambp_fx.schedule(model).segments if not s.chunked and s.reason]
    assert len(unchunked) == makes_a_weight
