"""Router logits, which transformers records by hooks, and the loss made of them: both doors, exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, in_double
from e2e_models import sample
from torch import nn

import streambp_fx
from benchmarks.families.configs import build
from benchmarks.families.worker import batch, plain_experts

BATCH = batch(37, (0, 5))


def model_of() -> Any:
    return build("qwen3_moe").double()


def step(model: nn.Module, call: Any, **more: Any) -> Any:
    model.zero_grad()
    out = call(**BATCH, use_cache=False, **more)
    out.loss.backward()
    return out


def streamed(model: nn.Module, door: str) -> Any:
    if door == "transform":
        streambp_fx.transform(model, chunk=8)
        return model
    return torch.compile(model, backend="streambp", options={"chunk": 8})


HOW = [(door, asked) for door in ("transform", "compile") for asked in ("by the call", "by the config")]


@pytest.mark.parametrize(("door", "asked"), sample(HOW, HOW[3]))
def test_the_balancing_loss_is_exact_and_streamed(door: str, asked: str) -> None:
    with in_double(model_of):
        model = model_of()
        eager = copy.deepcopy(model)
        plain_experts(eager)
        more = {"output_router_logits": True} if asked == "by the call" else {}
        eager.config.output_router_logits = model.config.output_router_logits = not more
        call = streamed(model, door)
        for _ in range(2):
            want, got = step(eager, eager, **more), step(model, call, **more)
            torch.testing.assert_close(got.loss, want.loss, rtol=1e-9, atol=0)
            torch.testing.assert_close(got.aux_loss, want.aux_loss, rtol=1e-9, atol=0)
            for (name, p), q in zip(eager.named_parameters(), model.named_parameters(), strict=True):
                error = (p.grad - q[1].grad).norm() / p.grad.norm()
                assert error < 1e-9, name
        assert_all_chunked(model)


@pytest.mark.slow
def test_others_record_as_before() -> None:
    """In the same process, with another backend, and after the model has been put back."""
    model: Any = build("qwen3_moe")
    given = {**BATCH, "output_router_logits": True, "use_cache": False}
    want = copy.deepcopy(model)(**given)
    streambp_fx.transform(model, chunk=8)(**given)
    streambp_fx.restore(model)
    for call in (model, torch.compile(copy.deepcopy(model), backend="eager")):
        found = call(**given)
        assert len(found.router_logits) == len(want.router_logits) == 2
        torch.testing.assert_close(found.aux_loss, want.aux_loss)
