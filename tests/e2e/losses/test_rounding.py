"""Sums of gradients in float32 become gradients in half precision, in their own memory where that is gone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import build, plain

import streambp_fx
from streambp_fx.runtime.segments import round_sums, segment_runner
from streambp_fx.runtime.segments.round_sums import is_added, rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (8,), (9, 1), (16, 2), (5, 67)])
def test_in_place_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(round_sums, "FIRST", 8)
    torch.manual_seed(0)
    total = torch.randn(shape)
    wanted, memory = total.to(dtype), total.untyped_storage().data_ptr()
    found = rounded(total, dtype, in_place=True)
    assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
    assert found.untyped_storage().data_ptr() == memory
    assert torch.equal(found, wanted)


def test_the_same_dtype_is_not_copied() -> None:
    total = torch.randn(5)
    assert rounded(total, torch.float32) is total and rounded(total, torch.float32, in_place=True) is total


class Noted(torch.autograd.Function):
    """Two inputs; what is known of each in the backward."""

    @staticmethod
    def forward(ctx: Any, number: int, one: torch.Tensor, other: torch.Tensor, note: list[bool]) -> Any:
        ctx.note = note
        return one + other * number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note += [is_added(ctx, 0), is_added(ctx, 1)]
        return None, gradient, gradient, None


@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize(
    ("of", "added"),
    [
        (lambda leaf: leaf, True),
        (lambda leaf: leaf.view(-1), False),  # its gradient goes through more
        (lambda leaf: leaf.detach(), False),  # it has none
    ],
)
def test_is_added(of: Callable[[torch.Tensor], torch.Tensor], added: bool, has: bool) -> None:
    leaf, first, note = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []
    if has:
        leaf.grad = torch.zeros(3)
    Noted.apply(2, first, of(leaf), note).sum().backward()
    assert note == [False, added and has]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """Three steps, of which the first finds no gradients, and a fourth with new ones."""
    model = build("llama", tie_word_embeddings=tied).to(torch.bfloat16)
    other = copy.deepcopy(model)
    places: list[bool] = []

    def noted(total: torch.Tensor, dtype: torch.dtype, in_place: bool = False) -> torch.Tensor:
        places.append(in_place)
        return rounded(total, dtype, in_place)

    for own in (model, other):
        streambp_fx.transform(own, chunk=16, loss_chunk=5)
    for step, length in enumerate((41, 33, 37, 41)):
        if step == 3:
            for own in (model, other):
                own.zero_grad(set_to_none=True)
        with monkeypatch.context() as patch:
            patch.setattr(segment_runner, "rounded", noted)
            places.clear()
            model(**plain(2, length)).loss.backward()
        assert any(places) == (step in (1, 2)) and all(places) == (step in (1, 2) and not tied)
        with monkeypatch.context() as patch:
            patch.setattr(segment_runner, "is_added", lambda *_: False)
            other(**plain(2, length)).loss.backward()
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, two.grad), (step, name)
            assert one.grad.untyped_storage().nbytes() == one.grad.nbytes, (step, name)


@pytest.mark.slow
def test_a_gradient_that_is_asked_for_is_the_same() -> None:
    """`torch.autograd.grad` where the parameters have gradients: those stay as they are."""
    model = build("llama").to(torch.bfloat16)
    streambp_fx.transform(model, chunk=16)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(**plain(2, 41)).loss, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    found = torch.autograd.grad(model(**plain(2, 41)).loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(bool((p.grad == 1).all()) for p in parameters if p.grad is not None)
