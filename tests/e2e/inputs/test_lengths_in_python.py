"""A length that Python or an op needs as a number: the message names the line, and a tensor is streamed."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, grads
from e2e_models import sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx import StreamBPWarning

VOCAB, WIDTH = 31, 16


class Scaled(nn.Module):
    """An attention, and a branch with a factor that depends on the length."""

    def __init__(self, factor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.factor = factor
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.query, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q = self.query(x)[:, None]
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        x = x + self.branch(x) * self.factor(x)
        return F.cross_entropy(self.head(x).mT, ids)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "log": lambda x: math.log(x.shape[1]),
    "linspace": lambda x: torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None],
    "range": lambda x: sum(0.1 * t for t in range(x.shape[1])),
}
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "new_full": lambda x: x.new_full((), x.shape[1]).log(),
    "tensor": lambda x: torch.tensor(x.shape[1]).log(),
    "full": lambda x: torch.full((), float(x.shape[1])).log(),
    "root": lambda x: x.shape[1] ** 0.5,
}


def pair(factor: Callable[[Tensor], Any]) -> tuple[nn.Module, nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Scaled(factor).double()
    eager = copy.deepcopy(model)
    return eager, model, torch.compile(model, backend="streambp", options={"chunk": 8, "loss_chunk": 8})


def compare(eager: nn.Module, model: nn.Module, call: Any, rows: int) -> None:
    ids = torch.randint(0, VOCAB, (2, rows))
    model.zero_grad(), eager.zero_grad()
    call(ids).backward(), eager(ids).backward()
    assert_close_grads(grads(model), grads(eager), 1e-9)


@pytest.mark.parametrize("factor", sample(NUMBERS, "log", "linspace"))
def test_the_line_is_named(factor: str) -> None:
    eager, model, call = pair(NUMBERS[factor])
    words = (
        rf"the length 37 became a number when the graph was traced.*test_lengths_in_python\.py:\d+.*{factor}"
    )
    with pytest.warns(StreamBPWarning, match=words):
        compare(eager, model, call, 37)


@pytest.mark.parametrize("factor", sample(TENSORS, "new_full"))
def test_a_tensor_is_streamed(factor: str) -> None:
    eager, model, call = pair(TENSORS[factor])
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        for rows in (37, 21):
            compare(eager, model, call, rows)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and all(s.chunked for s in schedule.segments)
