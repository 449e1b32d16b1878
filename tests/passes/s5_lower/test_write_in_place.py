"""Ops that write over dead operands: the same results, and never over what somebody still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.s5_lower.write_in_place import write_in_place

T = torch.Tensor


def chain(x: T, w: T) -> T:
    return ((x * w).exp() + w).neg() * 2


def view_is_read_later(x: T, w: T) -> tuple[T, T]:
    a = x * w
    v = a.view(-1)
    return a.exp(), v + 1


def unsafe_view_is_read_later(x: T, w: T) -> tuple[T, T]:
    product = x.reshape(-1, 6) @ w.t()
    v = torch.ops.aten._unsafe_view(product, [2, 3, 6])
    return v.exp(), product + 1


def operand_is_returned(x: T, w: T) -> tuple[T, T]:
    a = x * w[0]
    return a, a.exp()


def operand_twice(x: T, w: T) -> T:
    a = x + w[0]
    return a * a


def part_of_a_storage(x: T, w: T) -> tuple[T, T]:
    a = x * w[0]
    first, second = a[:, :2], a[:, 1:]
    return first.exp(), second.neg()


def expanded(x: T, w: T) -> T:
    a = (w[0] * 2).expand(2, 3, 6)
    return a + x


def broadcast_grows(x: T, w: T) -> T:
    a = w[0] * 2
    return a * x


def other_dtype(x: T, w: T) -> T:
    a = x.to(torch.float32) * 2
    return a * w[0]


def transposed(x: T, w: T) -> T:
    a = (x * w[0]).transpose(0, 1)
    return a.exp() + a.neg().clone()


def inputs_stay(x: T, w: T) -> T:
    return x.exp() + w[0].neg()


def commuted(x: T, w: T) -> T:
    return x * (x + w[0]) - w[0] * 3


def returned_view(x: T, w: T) -> tuple[T, T]:
    a = x * w[0]
    return a.exp(), a.view(6, 6)


CASES: list[Callable[..., Any]] = [
    chain, view_is_read_later, unsafe_view_is_read_later, operand_is_returned, operand_twice,
    part_of_a_storage,
    expanded, broadcast_grows, other_dtype, transposed, inputs_stay, commuted, returned_view,
]  # fmt: skip


def _inputs(case: Callable[..., Any]) -> tuple[T, T]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    w = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    return x, (w[0] if case in (chain, view_is_read_later) else w)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_same_bits_and_untouched_inputs(case: Callable[..., Any]) -> None:
    x, w = _inputs(case)
    traced = make_fx(case, tracing_mode="symbolic")(x, w)
    want = case(x.clone(), w.clone())
    write_in_place(traced.graph)
    traced.recompile()
    before = x.clone(), w.clone()
    got = traced(x, w)
    assert torch.equal(x, before[0]) and torch.equal(w, before[1]), "an input was written over"
    for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (want, got)), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_a_chain_makes_one_tensor() -> None:
    x, w = _inputs(chain)
    traced = make_fx(chain, tracing_mode="symbolic")(x, w)
    write_in_place(traced.graph)
    made = [n for n in traced.graph.nodes if n.op == "call_function" and not n.target._schema.is_mutable]
    assert [n.target for n in made] == [torch.ops.aten.mul.Tensor], traced.graph


@pytest.mark.parametrize("ignored", [-100, 0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_of_cross_entropy_over_the_one_that_comes_in(ignored: int, dtype: torch.dtype) -> None:
    """Bitwise autograd's; rows that are ignored have the gradient zero."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(7, 5, dtype=dtype, generator=generator)
    classes = (
        torch.tensor([0, 4, -100, 2, 4, 0, 1]) if ignored == -100 else torch.tensor([0, 4, 3, 2, 4, 0, 1])
    )
    cotangent = torch.randn(7, dtype=dtype, generator=generator)

    def gradient(s: T, t: T, g: T) -> tuple[T, T]:
        def loss(s: T) -> T:
            return torch.nn.functional.cross_entropy(s, t, reduction="none", ignore_index=ignored)

        values, pullback = torch.func.vjp(loss, s)
        with torch.no_grad():
            return values, pullback(g)[0]

    want = gradient(scores, classes, cotangent)
    traced = make_fx(gradient, tracing_mode="symbolic")(scores, classes, cotangent)
    write_in_place(traced.graph)
    traced.recompile()
    assert torch.ops.aten._log_softmax_backward_data.out in {n.target for n in traced.graph.nodes}
    got = traced(scores, classes, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert (got[1][classes == ignored] == 0).all()
