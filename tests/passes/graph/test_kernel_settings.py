"""Attention by products, while numbers are compared, and what a trace records meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from streambp_fx.passes.graph.kernel_settings import plain_attention
from streambp_fx.passes.graph.tracing import trace

aten = torch.ops.aten


def elsewhere() -> list[Any]:
    """Inputs on a CPU and on another device."""
    with FakeTensorMode():
        return [torch.empty(2, 3), 5, torch.empty(2, 3, device="cuda")]


def operands(dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    given = torch.randn(2, 4, 9, 8, dtype=dtype), *torch.randn(2, 2, heads, 9, 8, dtype=dtype).unbind()
    return tuple(x.requires_grad_() for x in given)


def kernel_of(call: Any) -> str:
    """The name of the node of autograd: fused kernels have one of their own."""
    return str(call().grad_fn.name())


CALLS: dict[str, Any] = {
    "function": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "op": lambda q, k, v: aten.scaled_dot_product_attention.default(
        q, k, v, None, 0.0, True, enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_on_other_devices(name: str) -> None:
    """The same numbers and gradients, by no fused kernel."""
    given = operands()
    fused = CALLS[name](*given)
    with plain_attention(elsewhere()):
        plain = CALLS[name](*given)
    with plain_attention(elsewhere()[:2]):
        assert kernel_of(lambda: CALLS[name](*given)) == fused.grad_fn.name()
    assert "Flash" in fused.grad_fn.name() and "ScaledDotProduct" not in plain.grad_fn.name()
    torch.testing.assert_close(plain, fused)
    assert plain.stride() == fused.stride(), "what follows may be a view"
    cotangent = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(o, given, cotangent) for o in (plain, fused)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_that_sees_nothing() -> None:
    mask = torch.ones(9, 9, dtype=torch.bool).tril().index_fill(0, torch.tensor([0, 1]), False)
    with plain_attention(elsewhere()):
        found = F.scaled_dot_product_attention(*operands(heads=4), attn_mask=mask)
    assert found[:, :, :2].eq(0).all() and found[:, :, 2:].ne(0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast(bias: bool) -> None:
    """Operands are cast as autocast casts them."""
    given, mask = operands(heads=4), torch.randn(9, 9) if bias else None
    with torch.autocast("cpu", torch.bfloat16):
        fused = F.scaled_dot_product_attention(*given, attn_mask=mask)
        with plain_attention(elsewhere()):
            plain = F.scaled_dot_product_attention(*given, attn_mask=mask)
    assert plain.dtype == fused.dtype == torch.bfloat16
    torch.testing.assert_close(plain, fused, rtol=0.02, atol=0.02)


def test_a_trace_is_of_what_runs_later() -> None:
    given = [x.detach() for x in operands(heads=4)]
    with plain_attention(elsewhere()):
        graph = trace(F.scaled_dot_product_attention, *given, pre_dispatch=True).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [_ATTENTION]


_ATTENTION = aten.scaled_dot_product_attention.default


def test_other_threads_have_their_kernels() -> None:
    given, seen = operands(heads=4), []
    with plain_attention(elsewhere()):
        thread = threading.Thread(
            target=lambda: seen.append(kernel_of(lambda: F.scaled_dot_product_attention(*given)))
        )
        thread.start()
        thread.join()
    assert "Flash" in seen[0]
