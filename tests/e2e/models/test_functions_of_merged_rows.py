"""Autograd functions of routers: on rows merged with samples, changing in place what they have made."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_functions import Function
from e2e_check import assert_all_chunked, check_exact
from e2e_models import CHUNK, HIDDEN, build, padded, plain, sample
from torch import Tensor, nn

import streambp_fx


class Picked(torch.autograd.Function):
    """The greatest entry of each row, whose gradient goes to all entries: a straight-through router."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        weights = x.softmax(-1)
        place = weights.argmax(-1, keepdim=True)
        ctx.save_for_backward(weights, place)
        return weights.gather(-1, place) * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        weights, place = ctx.saved_tensors
        made = weights * gradient.mul(-1)
        made.scatter_add_(-1, place, gradient.sum(-1, keepdim=True))
        made[..., :2].mul_(0.5)
        return made


class OverWhatItIsGiven(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2)


class OverAViewOfWhatItIsGiven(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient[..., 1:3].zero_()
        return gradient.clone()


class GradientOfAllRows(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0, keepdim=True)


class GradientOfTheRowBefore(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 0)


class CountsRows(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (gradient.shape[0] / 100)


class SumsRowsInPlace(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = gradient.clone()
        made[1:].add_(gradient[:-1])
        return made


def merged(x: Tensor, function: Any) -> Tensor:
    return function.apply(x.view(-1, x.shape[-1])).view(x.shape)


def merged_with_heads(x: Tensor, function: Any) -> Tensor:
    return function.apply(x.view(-1, 8)).view(x.shape)


def merged_the_other_way(x: Tensor, function: Any) -> Tensor:
    rows = x.transpose(0, 1)
    return function.apply(rows.reshape(-1, x.shape[-1])).view(rows.shape).transpose(0, 1)


def apart(x: Tensor, function: Any) -> Tensor:
    return function.apply(x)


def by_rows(x: Tensor, function: Any) -> Tensor:
    """Samples as columns: dim 0 is that of rows."""
    return function.apply(x.transpose(0, 1)).transpose(0, 1)


class Routed(nn.Module):
    """What an MLP makes goes through a function."""

    def __init__(self, inner: nn.Module, way: Callable[[Tensor, Any], Tensor], function: Any) -> None:
        super().__init__()
        self.inner, self.way, self.function = inner, way, function

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.inner(x), self.function)


def routed(way: Callable[[Tensor, Any], Tensor], function: Any) -> Any:
    model = build("llama")
    model.model.layers[1].mlp = Routed(model.model.layers[1].mlp, way, function)
    return model


BATCHES = {
    "T=67": plain(2, 67),
    "T=hidden size": plain(3, HIDDEN),
    "T=batch": plain(3, 3),
    "a tail of one row": plain(2, 4 * CHUNK + 1),
    "left": padded(65, "left"),
}
WAYS = (apart, merged, merged_with_heads, merged_the_other_way, by_rows)
ROWS_TOGETHER = {
    "OverWhatItIsGiven": (OverWhatItIsGiven, apart, "changes what it is given|mul_"),
    "OverAViewOfWhatItIsGiven": (OverAViewOfWhatItIsGiven, merged, "changes what it is given|zero_"),
    "GradientOfAllRows": (GradientOfAllRows, merged, "reduction over the sequence"),
    "GradientOfTheRowBefore": (GradientOfTheRowBefore, merged, "roll"),
    "CountsRows": (CountsRows, merged, "rows"),
    "SumsRowsInPlace": (SumsRowsInPlace, merged, "sequence|rows"),
    "SumsRowsInPlace by rows": (SumsRowsInPlace, by_rows, "sequence|rows"),
}


@pytest.mark.parametrize("way", sample(WAYS), ids=lambda way: way.__name__)
def test_rows_apart_are_streamed(way: Any) -> None:
    _, streamed = check_exact(functools.partial(routed, way, Picked), BATCHES)
    assert_all_chunked(streamed)


@pytest.mark.parametrize("name", sample(ROWS_TOGETHER))
def test_rows_together_are_not(name: str) -> None:
    function, way, reason = ROWS_TOGETHER[name]
    with pytest.warns(streambp_fx.StreamBPWarning):
        _, streamed = check_exact(functools.partial(routed, way, function), BATCHES, unchunked=None)
    whole = [s.reason for s in streambp_fx.schedule(streamed).segments if not s.chunked]
    assert any(re.search(reason, why) for why in whole), whole
