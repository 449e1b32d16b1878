"""PyTorch's CUDA attention ops as plain products on a CPU, so that programs made of them can run there.

Written after PyTorch 2.13: what an op expects of its operands is asserted; what it takes for granted of their
memory is read from memory in the same way, so that a wrong layout gives wrong numbers here as it would there.
Results lie in memory as those of the ops do. The flash ops take float32 here, besides half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from streambp_fx.passes.s4_trace import attention_kernels, cudnn_blocks

LSE_ROWS = 32


class FlashOnCpu(attention_kernels.CudaFlash):
    """The flash kernel of CUDA, taken for operands on a CPU and in float32."""

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        return mask is None and query.shape[-1] == value.shape[-1]


class CudnnOnCpu(attention_kernels.CudaCudnn):
    """cuDNN's kernel, taken for operands on a CPU and in float32."""

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        return mask is None and query.shape[-1] == value.shape[-1]


class EfficientOnCpu(attention_kernels.CudaEfficient):
    """The memory-efficient kernel of CUDA, taken for operands on a CPU."""

    def applies(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        return True


KERNELS = {"flash": (FlashOnCpu(),), "efficient": (EfficientOnCpu(),), "cudnn": (CudnnOnCpu(),)}
KERNELS["flash, efficient"] = KERNELS["flash"] + KERNELS["efficient"]
KERNELS["cudnn, efficient"] = KERNELS["cudnn"] + KERNELS["efficient"]


@pytest.fixture
def cuda_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within: the ops have a CPU implementation."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", flash)
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward)
    library.impl("_scaled_dot_product_cudnn_attention", cudnn)
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
    library.impl("_scaled_dot_product_efficient_attention", efficient)
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward)
    monkeypatch.setattr(cudnn_blocks, "MULTIPLE", 1)  # no block is left to flash
    yield
    library._destroy()


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """(B, H, c, n) float32 scores, minus infinity where a row does not read a column."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        assert query.shape[2] == key.shape[2], "which corner is meant depends on the kernel"
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _by_rows(value: Tensor) -> Tensor:
    """The same values, in memory as (B, c, H, D)."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_as(like: Tensor, value: Tensor) -> Tensor:
    """The same values, in memory as another tensor of that shape."""
    return torch.empty_like(like).copy_(value)


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, weights: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From softmax weights (B, H, c, n) that need not be normalised over these columns."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grad, dtype = grad.float(), query.dtype
    delta = (grad * out.float()).sum(-1, keepdim=True)
    inner = weights * (grad @ value.float().transpose(2, 3) - delta) * scale
    grads = inner @ key.float(), inner.transpose(2, 3) @ query.float(), weights.transpose(2, 3) @ grad
    return tuple(g.to(dtype) for g in grads)  # type: ignore[return-value]


# ---- flash: half precision, grouped heads, no mask


def _check_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> int:
    assert dropout == 0.0 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    return query.shape[1] // key.shape[1]


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    groups = _check_flash(query, key, value, dropout_p)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = _scores(query, key, None, is_causal, scale)
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    state = torch.full((2,), 7, dtype=torch.uint64), torch.full((), 7, dtype=torch.uint64)
    lengths = (query.shape[2], key.shape[2])
    return _laid_as(query, out), scores.logsumexp(-1), None, None, *lengths, *state, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    groups = _check_flash(query, key, value, dropout_p)
    assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.dtype == torch.float32 and logsumexp.shape == query.shape[:3]
    # by its address alone
    lse = logsumexp.as_strided(logsumexp.shape, torch.empty(logsumexp.shape, device="meta").stride())
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    weights = (_scores(query, keys, None, is_causal, scale) - lse.unsqueeze(-1)).exp()
    dq, *rest = _gradients(grad_out, query, keys, values, out, weights, scale)
    dk, dv = (g.unflatten(1, (-1, groups)).sum(2) for g in rest)
    return _laid_as(query, dq), _laid_as(key, dk), _laid_as(value, dv)


# ---- cuDNN: half precision, grouped heads, no mask, log-sum-exp (B, H, c, 1)


def _check_cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> int:
    assert dropout == 0.0 and bias is None and query.shape[1] % key.shape[1] == 0
    assert key.shape == value.shape and (query.shape[2], key.shape[2]) != (1, 1), "it refuses one on one"
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (query, key, value))
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 128
    return query.shape[1] // key.shape[1]


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    groups = _check_cudnn(query, key, value, attn_bias, dropout_p)
    assert compute_log_sumexp and not return_debug_mask
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = _scores(query, key, None, is_causal, scale)
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    lse, state = scores.logsumexp(-1, keepdim=True), torch.tensor(7)
    lengths = (query.shape[2], key.shape[2])
    return _laid_as(query, out), lse, None, None, *lengths, state, state, None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    groups = _check_cudnn(query, key, value, attn_bias, dropout_p)
    assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (query.shape[2], key.shape[2])
    assert logsumexp.dtype == torch.float32 and logsumexp.shape == (*query.shape[:3], 1)
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert logsumexp.squeeze(-1).is_contiguous(), "in other layouts nobody hands it to the op"
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    weights = (_scores(query, keys, None, is_causal, scale) - logsumexp).exp()
    dq, *rest = _gradients(grad_out, query, keys, values, out, weights, scale)
    dk, dv = (g.unflatten(1, (-1, groups)).sum(2) for g in rest)
    return _laid_as(query, dq), _laid_as(key, dk), _laid_as(value, dv)


# ---- memory-efficient: float32 as well, a bias, no grouped heads


def _check_efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> None:
    assert dropout == 0.0 and query.shape[1] == key.shape[1] == value.shape[1]
    assert all(x.stride(-1) == 1 and x.shape[-1] % 4 == 0 for x in (query, key, value))
    if bias is not None:
        assert bias.dtype == query.dtype and bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(3) == 1 and all(s % 8 == 0 for s in bias.stride()[:3])


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _check_efficient(query, key, value, attn_bias, dropout_p)
    assert compute_log_sumexp
    scores = _scores(query, key, attn_bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # a row that reads nothing gives 0
    out = ((scores - lse.unsqueeze(-1)).exp() @ value.float()).to(query.dtype)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_ROWS), value=math.inf)
    return _by_rows(out), padded, torch.tensor(7), torch.tensor(7)


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _check_efficient(query, key, value, attn_bias, dropout_p)
    batch, heads, rows, _ = query.shape
    width = value.shape[-1]
    assert list(grad_input_mask) == [True, True, True, False]
    assert logsumexp.dtype == torch.float32 and all(s % 8 == 0 for s in logsumexp.stride()[:2])
    # the strides of batch and heads are passed on; that of the rows is taken to be H * D
    out = out.as_strided((batch, heads, rows, width), (out.stride(0), out.stride(1), heads * width, 1))
    # rows up to the next multiple of 32 are read as if they were there, with whatever lies in their place
    extra = -rows % LSE_ROWS
    lse = logsumexp[:, :, : rows + extra]
    assert lse.shape[2] == rows + extra
    more = lambda x: torch.nn.functional.pad(x, (0, 0, 0, extra), value=1.0)  # noqa: E731
    scores = torch.nn.functional.pad(_scores(query, key, attn_bias, is_causal, scale), (0, 0, 0, extra))
    weights = (scores - lse.unsqueeze(-1)).exp()
    dq, dk, dv = _gradients(more(grad_out_), more(query), key, value, more(out), weights, scale)
    return _by_rows(dq[:, :, :rows]), _by_rows(dk), _by_rows(dv), None
