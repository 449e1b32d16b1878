"""A small causal LM around one piece of code under test, and the pieces such code uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 19, 12, 3
NEVER = float("-inf")
HUGE = torch.finfo(torch.float64).min
Block = Callable[["Subject", Tensor, Tensor], Any]


def generator_of(seed: int) -> torch.Generator:
    """On PyTorch's default device, where what it draws is made."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def heads(x: Tensor) -> Tensor:
    """(batch, T, width) -> (batch, heads, T, head)."""
    return x.view(*x.shape[:2], HEADS, x.shape[-1] // HEADS).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(batch, heads, T, head) -> (batch, T, width)."""
    return x.transpose(1, 2).flatten(2)


def grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as a column and as a row, for a value whose dim 1 is the sequence."""
    position = torch.arange(x.shape[1])
    return position[:, None], position[None, :]


def later(x: Tensor) -> Tensor:
    """(T, T), true where the column is after the row."""
    i, j = grid(x)
    return j > i


def token_loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


class Subject(nn.Module):
    """Embedding, causal attention with a residual, a block under test before or after it, and a loss.

    Args:
        block: (model, x, ids) -> x, of the shape (batch, T, width).
        loss: (model, x, ids) -> what the forward returns.
        parts: makes modules, parameters and buffers (plain tensors) of its own, by name.
        before: the block is before the attention.
    """

    def __init__(
        self,
        block: Block | None = None,
        loss: Block = token_loss,
        parts: Callable[[], Mapping[str, Any]] | None = None,
        before: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.lin, self.lin2, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.table = nn.Parameter(torch.randn(100, WIDTH))
        for name, part in (parts() if parts else {}).items():
            if isinstance(part, (nn.Module, nn.Parameter)):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        self.block, self.loss, self.before = block, loss, before
        self.double().train()

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def scores(self, x: Tensor) -> Tensor:
        """(batch, heads, T, T) of second projections, not masked."""
        return heads(self.lin(x)) @ heads(self.lin2(x)).transpose(2, 3) * 0.4

    def weighted(self, x: Tensor, weights: Tensor) -> Tensor:
        return joined(weights @ heads(self.v(x)))

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        if self.block is not None and self.before:
            x = self.block(self, x, input_ids)
        x = x + self.attend(self.norm(x))
        if self.block is not None and not self.before:
            x = self.block(self, x, input_ids)
        return self.loss(self, x, input_ids)
