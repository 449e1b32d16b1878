"""cuDNN's attention on blocks, as two ops: `streambp_fx::block_attention` and its backward.

NOTE [which blocks cuDNN gets]: those whose rows and columns are multiples of `MULTIPLE`; the others go to
PyTorch's flash attention. Which it is, is known when the op runs, not when it is traced. For other sizes
cuDNN 9.19 is wrong on an H100: in the backward of a block that is not causal, a last tile of up to 64 rows or
columns gives NaN for the query where log-sum-exps are low (about -90), with no mask as well as with one
(pytorch/pytorch#196678; docs/gpu.md), and one row on one column is refused. And it compiles a kernel for each
pair of rows and columns, about 50 ms each: see NOTE [rows in tiles] in `step.row_chunks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..step.row_chunks import TILE

aten = torch.ops.aten
#: Rows and columns of blocks for cuDNN are multiples of it.
MULTIPLE = TILE  # so most blocks are such: chunks are cut by it

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define(
    "block_attention(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "block_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)"
)
BLOCK_ATTENTION = torch.ops.streambp_fx.block_attention.default
BLOCK_ATTENTION_BACKWARD = torch.ops.streambp_fx.block_attention_backward.default


def for_cudnn(query: Tensor, key: Tensor) -> bool:
    """True if a block goes to cuDNN, see NOTE [which blocks cuDNN gets].

    Args:
        query: (B, H, c, D).
        key: (B, H or fewer, n, D).
    """
    return query.shape[2] % MULTIPLE == 0 and key.shape[2] % MULTIPLE == 0


def flash(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention on CUDA: output (B, H, c, D) and log-sum-exp (B, H, c), float32.

    Args:
        query: (B, H, c, D), in half precision.
        key, value: (B, H or fewer, n, D), likewise.
    """
    op = aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = op(query, key, value, 0.0, is_causal, False, scale=scale)
    return out, lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each in the shape and dtype of its operand.

    The kernel reads the log-sum-exp as contiguous; offsets are for sequences of several lengths.

    Args:
        grad_out, out: (B, H, c, D), in half precision.
        query, key, value: as of `flash`.
        logsumexp: (B, H, c), float32.
    """
    operands = (grad_out, query, key, value, out, logsumexp.contiguous(), None, None)
    lengths = (query.shape[2], key.shape[2])
    state = torch.empty((2,), dtype=torch.uint64, device=query.device)  # of dropout, so not read
    op = aten._scaled_dot_product_flash_attention_backward.default
    return op(*operands, *lengths, 0.0, is_causal, state, state, scale=scale)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if for_cudnn(query, key):
        op = aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
        lse = lse.squeeze(-1)
    else:
        out, lse = flash(query, key, value, is_causal, scale)
    return _laid_out_as(query, out), lse.contiguous()


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if for_cudnn(query, key):
        lse, lengths = logsumexp.contiguous(), (query.shape[2], key.shape[2])
        state = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, so not read
        given = (grad_out, query, key, value, out, lse.unsqueeze(-1), state, state, None, None, None)
        op = aten._scaled_dot_product_cudnn_attention_backward
        made = op(*given, *lengths, 0.0, is_causal, scale=scale)
    else:
        made = flash_backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)
    grad_query, grad_key, grad_value = (
        _laid_out_as(like, gradient) for like, gradient in zip((query, key, value), made, strict=True)
    )
    return grad_query, grad_key, grad_value


def _laid_out_as(like: Tensor, value: Tensor) -> Tensor:
    """A value in the memory layout that the trace has seen: that of the operand."""
    wanted = torch.empty_like(like, device="meta").stride()
    return value if value.stride() == wanted else torch.empty_like(like).copy_(value)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


for _name, _run, _fake in (
    ("block_attention", _forward, _fake_forward),
    ("block_attention_backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streambp_fx::{_name}", _fake)
