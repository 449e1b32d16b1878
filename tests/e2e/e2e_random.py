"""Random small models: blocks drawn from a menu of what people write, and losses of all shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 19, 12, 3
NEVER = float("-inf")
HUGE = torch.finfo(torch.float64).min
Block = Callable[["RandomModel", Tensor, list[Tensor], Tensor], Tensor]


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def grid(x: Tensor) -> tuple[Tensor, Tensor]:
    position = torch.arange(x.shape[1])
    return position[:, None], position[None, :]


def attend(model: RandomModel, x: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    q, k, v = (heads(p(x)) for p in model.maps[:3])
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal))


def by_hand(model: RandomModel, x: Tensor, hidden: Tensor, value: float) -> Tensor:
    q, k, v = (heads(p(x)) for p in model.maps[3:])
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(hidden, value)
    return joined(scores.softmax(-1) @ v)


def grouped(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    shared = (t.unsqueeze(1).expand(-1, HEADS, -1, -1) for t in model.narrow(x).chunk(2, -1))
    return joined(F.scaled_dot_product_attention(heads(model.maps[0](x)), *shared, is_causal=True))


def across(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    """Keys of an early layer, values of the last one, none of them projected."""
    return joined(F.scaled_dot_product_attention(heads(x), heads(past[0]), heads(past[-1]), is_causal=True))


def chained(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    first = attend(model, x)
    q, k, v = heads(model.maps[3](x)), heads(model.maps[4](first)), heads(first * x)
    return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def padding(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    i, j = grid(x)
    keep = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != 3], 1)
    return attend(model, x, (j <= i)[None, None] & keep[:, None, None, :], causal=False)


def slopes(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    i, j = grid(x)
    bias = (-(i - j).abs() * 0.1).to(x.dtype).masked_fill(j > i, NEVER)
    return attend(model, x, bias[None, None], causal=False)


def no_grad(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    with torch.no_grad():
        factor = model.maps[2](x).exp()
    return factor * model.maps[3](x)


def merged(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    batch, length, width = x.shape
    rows = model.maps[5](x.transpose(0, 1).reshape(length * batch, width)).tanh()
    return rows.view(length, batch, width).transpose(0, 1)


def hidden(where: Callable[[Tensor, Tensor], Tensor], value: float) -> Block:
    return lambda model, x, past, ids: by_hand(model, x, where(*grid(x)), value)


BLOCKS: dict[str, Block] = {
    "causal": lambda m, x, past, ids: attend(m, x),
    "both ways": lambda m, x, past, ids: attend(m, x, causal=False),
    "window": lambda m, x, past, ids: attend(
        m, x, (grid(x)[1] <= grid(x)[0]) & (grid(x)[1] > grid(x)[0] - 5), False
    ),
    "hidden": hidden(lambda i, j: j > i, NEVER),
    "hidden window": hidden(lambda i, j: (j > i) | (j <= i - 7), HUGE),
    "rows that see nothing": hidden(lambda i, j: (j > i) | (j < 2), HUGE),
    "grouped": grouped,
    "across": across,
    "chained": chained,
    "padding": padding,
    "slopes": slopes,
    "merged": merged,
    "no_grad": no_grad,
    "mlp": lambda m, x, past, ids: m.down(F.gelu(m.up(x))),
    "gated": lambda m, x, past, ids: torch.mul(*m.up(x).chunk(2, -1)),
    "shift": lambda m, x, past, ids: F.pad(x, (0, 0, 1, 0))[:, :-1] * m.maps[0].bias,
    "constant": lambda m, x, past, ids: x @ (m.maps[0].weight @ m.maps[1].weight.T) * 0.1,
    "data": lambda m, x, past, ids: x * (ids % 3 == 0).unsqueeze(-1) + ids.cumsum(1).unsqueeze(-1) * x / 100,
    "skip": lambda m, x, past, ids: past[0] * x,
    "mean": lambda m, x, past, ids: x.mean(1, keepdim=True) * m.maps[3](x),
    "flip": lambda m, x, past, ids: x.flip(1),
    "detached": lambda m, x, past, ids: x.detach() * m.maps[1](x),
    "table": lambda m, x, past, ids: x * m.table[ids] + m.table[torch.arange(x.shape[1])],
}


def token_loss(model: RandomModel, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def log_probabilities(model: RandomModel, x: Tensor, ids: Tensor) -> Tensor:
    return model.head(x).log_softmax(-1).gather(-1, ids[..., None])[..., 0] * (ids > 5)


LOSSES: dict[str, Block] = {
    "tokens": token_loss,
    "sum": lambda m, x, past, ids: F.cross_entropy(m.head(x).transpose(1, 2), ids, reduction="sum") / 50,
    "preference": lambda m, x, past, ids: -log_probabilities(m, x, ids).sum(1).sigmoid().mean(),
    "the last row": lambda m, x, past, ids: m.head(x)[:, -1].logsumexp(-1).mean(),
    "the last rows": lambda m, x, past, ids: m.head(x[:, -2:]).square().mean(),
    "and a norm": lambda m, x, past, ids: token_loss(m, x, past, ids) + 0.1 * past[-1].square().mean(),
    "two heads": lambda m, x, past, ids: token_loss(m, x, past, ids) + m.head(past[0]).logsumexp(-1).mean(),
    "squared": lambda m, x, past, ids: token_loss(m, x, past, ids) ** 2 + x.sum() * 0.01,
    "greatest": lambda m, x, past, ids: m.head(x).amax((1, 2)).mean(),
    "hidden states": lambda m, x, past, ids: x.tanh().mean(),
}


class RandomModel(nn.Module):
    """Embedding, one to four random blocks with residuals, and a random loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.embed, self.head, self.norm = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, VOCAB),
            nn.LayerNorm(WIDTH),
        )
        self.maps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, 2 * (WIDTH // HEADS))
        self.table = nn.Parameter(torch.randn(100, WIDTH))
        self.plan = [choose.choice(sorted(BLOCKS)) for _ in range(choose.randint(1, 4))]
        self.loss, self.positions = choose.choice(sorted(LOSSES)), choose.random() < 0.3
        self.expensive = choose.choice([4.0, 4.0, 0.0, 50.0])
        self.chunk, self.loss_chunk = choose.choice([1, 3, 8, 16]), choose.choice([2, 8])
        self.lengths = [choose.randint(2, 40), choose.randint(2, 70), self.chunk + 1]
        self.batch = choose.randint(1, 3)
        self.double()

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        if self.positions:
            x = x + self.table[: ids.shape[1]]
        past = [x]
        for index, name in enumerate(self.plan):
            y = BLOCKS[name](self, self.norm(x), past, ids)
            x = x + y if index % 2 == 0 else y + 0.5 * x
            past.append(x)
        return LOSSES[self.loss](self, x, past, ids)
