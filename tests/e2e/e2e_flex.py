"""Small models with FlexAttention, and PyTorch's formula of it.

On a CPU `flex_attention` refuses operands that have a gradient, and its own backward is not what tests
compare with: that is the formula of its forward (`math_attention`), differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, gelu
from transformers.modeling_outputs import CausalLMOutput

VOCAB, HEADS, HEAD = 50, 4, 8
Attention = Callable[..., Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    **kw: Any,
) -> Any:
    """`flex_attention` in a graph; its formula outside of one."""
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, score_mod, block_mask, scale, **kw)
    mask = (flex.noop_mask,) if block_mask is None else block_mask.as_tuple()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _ = math_attention(q, k, v, score_mod or flex._identity, mask, scale, {})
    return (out, flex.AuxOutput(lse=lse * math.log(2))) if kw.get("return_aux") else out


def block_mask(ids: Tensor, function: Any, by_sample: bool = False, heads: int | None = None) -> BlockMask:
    size = ids.shape[1]
    return create_block_mask(
        function, ids.shape[0] if by_sample else None, heads, size, size, device=ids.device
    )


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


class Model(nn.Module):
    """A language model whose attention is a function of its layer, query, key, value and ids."""

    def __init__(self, attention: Attention, layers: int = 1, shared: int = 2, head: int = HEAD) -> None:
        super().__init__()
        self.attention, self.head_size = attention, head
        width = HEADS * head
        self.embed, self.out = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(Layer(width, head, HEADS // shared) for _ in range(layers))

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            rows = layer.norm(x)
            heads = [p(rows).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for p in layer.projections]
            x = x + layer.merge(self.attention(layer, *heads, input_ids, **kwargs).transpose(1, 2).flatten(2))
            x = x + layer.down(gelu(layer.up(x)))
        logits = self.out(x)[:, :-1]
        return CausalLMOutput(loss=cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten()))


class Layer(nn.Module):
    def __init__(self, width: int, head: int, key_heads: int) -> None:
        super().__init__()
        heads = (HEADS, key_heads, key_heads)
        self.projections = nn.ModuleList(nn.Linear(width, n * head) for n in heads)
        self.merge, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, HEADS))
        self.distances = nn.Parameter(torch.linspace(0, 1, HEADS * 64).view(HEADS, 64))


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
