"""Sizes that become different, or very small, between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adversaries.calls import Keeping
from adversaries.situations import Crossing, finite, plain
from e2e_adversary import Record, tokens
from e2e_check import assert_streamed
from e2e_models import sample
from e2e_subject import HEADS, NEVER, WIDTH, Subject, heads, joined, later, token_loss
from test_calls import every, exact
from torch import Tensor, nn
from torch.nn import functional as F

from streambp_fx.backend import schedules_of
from streambp_fx.transform import schedules


def scored(m: Subject, x: Tensor) -> tuple[Tensor, Tensor]:
    h = m.norm(x)
    return heads(m.q(h)), heads(m.k(h))


def by_module(m: Subject, x: Tensor) -> Tensor:
    hidden = later(x).to(x.dtype).masked_fill(later(x), NEVER)
    return m.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]


def by_exponentials(m: Subject, x: Tensor) -> Tensor:
    q, k = scored(m, x)
    weights = (q @ k.mT).masked_fill(later(x), -1e30).exp()
    return m.weighted(x, weights / weights.sum(-1, keepdim=True))


def linear(m: Subject, x: Tensor) -> Tensor:
    q, k = scored(m, x)
    return m.weighted(x, torch.einsum("bhid,bhjd->bhij", q.exp(), k.exp()).tril())


ATTENTIONS = {"a module": by_module, "exponentials": by_exponentials, "linear": linear}


class OwnAttention(Subject):
    """No op of it is called an attention or a softmax."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.attention = how, nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        return token_loss(self, x + ATTENTIONS[self.how](self, x), input_ids)


@pytest.mark.parametrize("how", sample(ATTENTIONS, "linear"))
def test_the_sequence_is_found_in_any_attention(how: str) -> None:
    """Where a part of it is not streamed, that is said."""
    model, warned = exact(lambda: OwnAttention(how), lengths((2, 33), (3, 20)), "compile")
    assert any(s.chunked for each in schedules_of(model) for s in each.segments)
    assert "unchunked" in warned[0] if how == "linear" else warned == []


class Masked(Subject):
    """Its mask has a row and a column for each token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.embed(input_ids)
        q, k, v = (heads(part(self.norm(x))) for part in (self.q, self.k, self.v))
        mixed = joined(F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask))
        return token_loss(self, x + self.out(mixed), input_ids)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_a_mask_of_scores(door: str) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in ((2, 33), (3, 20), (9, 9)):
            ids = tokens(batch, length)
            seen = ~later(ids)[None, None].repeat(batch, 1, 1, 1)
            seen[-1, :, 3:, 1] = False
            record.step(m, call, ids, attention_mask=seen)

    model, warned = exact(Masked, run, door)
    assert_streamed(model)
    assert not warned


def lengths(*sizes: tuple[int, int]) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in sizes:
            record.step(m, call, tokens(batch, length))

    return run


def crossing(*lengths: tuple[int, int]) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        for rows, columns in lengths:
            encoded = m.table[:columns].detach().expand(2, -1, -1).clone().requires_grad_()
            record.step(m, call, tokens(2, rows), encoded)
            record("encoded", encoded.grad)

    return run


CROSSING = {
    "equal at first": ((33, 33), (20, 33), (33, 17), (20, 20)),
    "different at first": ((33, 17), (20, 20), (12, 33)),
}


@pytest.mark.parametrize(("name", "door"), every(CROSSING, ("equal at first", "transform")))
def test_two_inputs(name: str, door: str) -> None:
    model, _ = exact(Crossing, crossing(*CROSSING[name]), door)
    if door == "transform":
        assert any(s.chunked for each in schedules(model) or () for s in each.segments)


EMPTY = {
    "one token": ((2, 1), (2, 33), (2, 1)),
    "no token": ((2, 33), (2, 0), (0, 0), (2, 20)),
    "no sample": ((0, 33), (2, 33), (0, 12)),
    "one of one": ((1, 1), (1, 33)),
}


@pytest.mark.parametrize(("name", "door"), every(EMPTY, ("no token", "compile")))
def test_next_to_nothing(name: str, door: str) -> None:
    exact(lambda: Subject(plain, finite), lengths(*EMPTY[name]), door)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "compile"))
def test_a_lone_integer(door: str) -> None:
    """Also where it is 0, 1, and as many as the tokens: then the head reads what the layer keeps."""

    def run(m: Any, call: Any, record: Record) -> None:
        for keep in (5, 7, 0, 1, 33, 9):
            record.step(m, call, tokens(2, 33), keep)

    exact(Keeping, run, door)


@pytest.mark.parametrize("door", sample(["transform", "compile"]))
def test_ids_in_any_layout(door: str) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        for ids in (tokens(33, 2).T, tokens(4, 66)[::2, ::2], tokens(1, 33).expand(3, -1)):
            record.step(m, call, ids)

    model, warned = exact(lambda: Subject(plain), run, door)
    assert_streamed(model)
    assert not warned


def test_sizes_that_were_constants_are_compared() -> None:
    """As many samples as tokens: the batch size was a number to that graph."""

    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in ((9, 9), (10, 9), (9, 10), (3, 21)):
            torch.manual_seed(0)
            record.step(m, call, tokens(batch, length))

    exact(lambda: Subject(plain), run, "compile")
