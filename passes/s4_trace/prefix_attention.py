"""Attention of a chunk's queries over the state, by blocks, and the reads of the state.

Keys and values of a segment live in one buffer; chunks write their rows and attention reads a view.
Chunks are differentiated from the last to the first, so when a chunk's turn comes the gradient of its own
state rows is complete: the backward of a read adds to the gradient buffer and hands the finished rows on.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .attention_kernels import BIAS_COLUMNS, AttentionBlock, Kernel, additive
from .columns_of_others import ATTEND_TO_OTHERS, ATTEND_TO_OTHERS_BACKWARD


class StateRead(torch.autograd.Function):
    """The columns a chunk reads, its own rows written first.

    Backward returns the finished gradient of the chunk's own rows.
    """

    @staticmethod
    def forward(
        own: Tensor, columns: Tensor, own_columns: Tensor, gradient: Tensor, own_gradient: Tensor
    ) -> Tensor:
        """Write the own rows (B, H, c, D) into the buffer, and return a view of all columns (B, H, n, D)."""
        own_columns.copy_(own)
        return columns.view_as(columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep the gradient buffers, and the dtype of the own rows."""
        own, _, _, ctx.gradient, ctx.own_gradient = inputs
        ctx.dtype = own.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        """Add the gradient of the columns to the buffer, and return the finished gradient of the own rows."""
        ctx.gradient.add_(gradient)
        return _as_result(ctx.own_gradient, ctx.dtype), None, None, None, None


def _as_result(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that is an input of the program, as a value that the trace has made: a view, or cast."""
    return gradient.view_as(gradient) if gradient.dtype == dtype else gradient.to(dtype)


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    prefix: int,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries at columns [prefix, end) over columns [0, end).

    Shapes: query (B, H, c, D); key and value (B, H or fewer, prefix + c, D); out (B, H, c, D); log-sum-exp
    (B, H, c). If `causal`, the prefix is read without a mask and only the diagonal block is triangular; the
    two are merged by log-sum-exp. Otherwise one block is read under `bias`.
    """
    if not causal:
        return read(kernel, AttentionBlock(query, key, value, bias, scale=scale))
    rows = query.shape[2]
    own_key, own_value = (x.narrow(2, prefix, rows) for x in (key, value))
    out, lse = kernel.forward(AttentionBlock(query, own_key, own_value, causal=True, scale=scale))
    if isinstance(prefix, int) and prefix == 0:
        return out, lse
    key, value = (x.narrow(2, 0, prefix) for x in (key, value))
    out_before, lse_before = read(kernel, AttentionBlock(query, key, value, scale=scale))
    both = torch.logaddexp(lse, lse_before)
    weight, weight_before = ((x - both).exp().unsqueeze(-1) for x in (lse, lse_before))
    return (out * weight + out_before * weight_before).to(query.dtype), both


def read(kernel: Kernel, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Output (B, H, c, D) and log-sum-exp (B, H, c) of a block that is not causal."""
    groups = _stacked(kernel, block)
    out, lse = kernel.forward(replace(block, query=stack(block.query, groups)))
    return unstack(out, groups), unstack(lse, groups)


def differentiated(
    kernel: Kernel, gradient: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of query, key and value, each in the shape and dtype of its operand.

    Args:
        gradient, out: of the output over all blocks, (B, H, c, D), and that output.
        lse: the log-sum-exp over all blocks, (B, H, c).
    """
    groups = _stacked(kernel, block)
    dout, q, o, sums = (stack(x, groups) for x in (gradient, block.query, out, lse))
    dq, dk, dv = kernel.backward(dout, replace(block, query=q), o, sums)
    return unstack(dq, groups), dk, dv


def _stacked(kernel: Kernel, block: AttentionBlock) -> int:
    """How many query heads of a group become rows of one head: none where rows differ in what they read."""
    alike = block.bias is None and not block.causal
    return kernel.stacked(block.query, block.key) if alike else 1


def stack(rows: Tensor, groups: int) -> Tensor:
    """(B, H, c, ...) -> (B, H / groups, groups * c, ...)."""
    return rows if groups == 1 else rows.unflatten(1, (-1, groups)).flatten(2, 3)


def unstack(rows: Tensor, groups: int) -> Tensor:
    """(B, H / groups, groups * c, ...) -> (B, H, c, ...)."""
    return rows if groups == 1 else rows.unflatten(2, (groups, -1)).flatten(1, 2)


class PrefixAttention(torch.autograd.Function):
    """A kernel's attention over the state, differentiated block by block with the merged log-sum-exp."""

    @staticmethod
    def forward(
        query: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        key: Tensor,
        value: Tensor,
        key_gradient: Tensor,
        value_gradient: Tensor,
        own_key_gradient: Tensor,
        own_value_gradient: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        prefix: int,
        causal: bool,
        scale: float | None,
        pieces: int,
        of_others: bool,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, as of `attend`; the own rows already lie in `key` and `value`.

        `pieces` is how many parts of the prefix are differentiated one after the other, see
        NOTE [prefix in pieces]. With `of_others` the columns are those of this device, and others have more,
        see NOTE [columns in blocks]; causal attention alone can.
        """
        out, lse = attend(kernel, query, key, value, bias, prefix, causal, scale)
        return ATTEND_TO_OTHERS(query, key, value, out, lse, scale) if of_others else (out, lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        """Save the operands, the output and the log-sum-exp; keep the gradient buffers."""
        query, _, _, key, value, *ctx.gradients, bias = inputs[:10]
        ctx.kernel, ctx.prefix, ctx.causal, ctx.scale, ctx.pieces, ctx.of_others = inputs[10:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, *output, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple:
        """Add the gradients of keys and values to their buffers, block by block.

        Returns the gradient of the query, and the finished gradients of the chunk's own keys and values.
        These are not finished as long as other devices add to them, and are then left to a later sweep.
        """
        query, key, value, out, lse, bias = ctx.saved_tensors
        grad_key, grad_value, own_key, own_value = ctx.gradients
        rows = query.shape[2]
        if ctx.causal:
            blocks = [(ctx.prefix, rows, True)]
            blocks += [(*piece, False) for piece in _pieces(ctx.prefix, ctx.pieces)]
        else:
            blocks = [(*piece, False) for piece in _pieces(key.shape[2], ctx.pieces, BIAS_COLUMNS)]
        grad_query = None
        for start, length, causal in blocks:
            keys, values = (x.narrow(2, start, length) for x in (key, value))
            whole = bias is None or len(blocks) == 1 or bias.shape[-1] == 1
            own = bias if whole else bias.narrow(-1, start, length)
            block = AttentionBlock(query, keys, values, own, causal, ctx.scale)
            dq, dk, dv = differentiated(ctx.kernel, gradient, block, out, lse)
            grad_key.narrow(2, start, length).add_(dk)
            grad_value.narrow(2, start, length).add_(dv)
            grad_query = dq if grad_query is None else grad_query.add_(dq)
        if ctx.of_others:
            assert grad_query is not None
            operands = (gradient, query, key, value, grad_key, grad_value, out, lse, ctx.scale)
            return (grad_query.add_(ATTEND_TO_OTHERS_BACKWARD(*operands)), *(None,) * 15)
        results = (_as_result(g, x.dtype) for g, x in ((own_key, key), (own_value, value)))
        return (grad_query, *results, *(None,) * 13)


def _pieces(prefix: Any, pieces: int, multiple: int = 1) -> list[tuple[Any, Any]]:
    """First column and length of each piece of the prefix, or of all columns where there is a bias, as many
    as a multiple of a number; the last takes what is left over.

    NOTE [prefix in pieces]: the kernels return the gradients of keys and values whole, before they are added
    to the sums: as many bytes again as the keys and values themselves. Where the states of one layer are the
    peak, because rows lie elsewhere or on several devices, a quarter of them at a time is differentiated.
    Otherwise the peak lies in other places, and more kernels would only take time.
    """
    if isinstance(prefix, int) and prefix == 0:
        return []
    if pieces == 1 or prefix < pieces * multiple:
        return [(0, prefix)]
    length = prefix // (pieces * multiple) * multiple
    last = (pieces - 1) * length
    return [*((k * length, length) for k in range(pieces - 1)), (last, prefix - last)]


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: Any = None,
    grouped: bool = True,
) -> Tensor:
    """Attention as products and a softmax: any device, any head sizes, and dropout.

    Shapes: query (B, H, c, D); key (B, H or fewer, n, D); value (B, H or fewer, n, Dv); mask (B, H, c, n), or
    what broadcasts to it, bool or added to the scores. The result is (B, H, c, Dv), in the query's dtype.

    Args:
        dropout: applied to the attention weights (B, H, c, n); None: no dropout.
        grouped: fewer heads of keys are declared as groups to PyTorch, and not broadcast.
    """
    groups = query.shape[1] // key.shape[1] if query.dim() == 4 else 1
    if dropout is None:
        given: dict[str, Any] = {"scale": scale, "enable_gqa": grouped and groups > 1}
        if query.device.type == "cpu":
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, **given)
        bias = additive(mask, query)
        return torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, bias, **given)[0]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    bias = additive(mask, scores)
    # a row that sees nothing has no weights, as in PyTorch's own
    weights = scores.softmax(-1) if bias is None else torch.ops.aten._safe_softmax.default(scores + bias, -1)
    return dropout(weights) @ value


def causal_block(prefix: Any, rows: Any, columns: Any, device: torch.device) -> Tensor:
    """Boolean (rows, columns) mask of a chunk whose first row is column `prefix`."""
    row = torch.arange(rows, device=device) + prefix
    return torch.arange(columns, device=device).unsqueeze(0) <= row.unsqueeze(1)


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator with a seed of any length.

    NOTE [32 bits of a seed]: PyTorch's generator for CPUs reads no more than the low 32 bits of its seed, and
    ours hold the segment above them. So those that it gets are drawn from all bits.
    """
    return torch.Generator(device=device).manual_seed(random.Random(seed).getrandbits(32))


# Programs in which an op named dropout_mask stood may be in Inductor's cache with nothing dropped, see NOTE
# [modes of a step]: this is another name.
@torch.library.custom_op("streambp_fx::dropout_factors", mutates_args=())
def dropout_mask(like: Tensor, probability: float, seed: int) -> Tensor:
    """Factors 0 or 1 / (1 - p), shape and dtype of `like`, drawn from a generator with this seed."""
    if probability == 1.0:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    generator = seeded_generator(like.device, seed)
    keep = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return keep.bernoulli_(1.0 - probability, generator=generator).div_(1.0 - probability)


@dropout_mask.register_fake
def _(like: Tensor, probability: float, seed: int) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
