"""What random models are drawn from: blocks and losses of the adversaries, and ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from adversaries import (
    attention,
    buffers,
    complex_values,
    functions,
    gradients,
    hooks,
    in_place,
    objectives,
    random_ops,
    scores,
    situations,
    views,
)
from e2e_adversary import REFUSED, Cases
from e2e_subject import HUGE, NEVER, VOCAB, Subject, grid, heads, joined, later
from torch import Tensor

# (unit, x, values of earlier layers, ids) -> x, or what the forward returns.
Layer = Callable[[Subject, Tensor, list[Tensor], Tensor], Any]
Entry = tuple[Layer, Any]


def attend(m: Subject, x: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal))


def hidden(where: Callable[[Tensor, Tensor], Tensor], value: float) -> Layer:
    def layer(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
        return x + m.weighted(x, m.scores(x).masked_fill(where(*grid(x)), value).softmax(-1))

    return layer


def grouped(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    shared = (t.unsqueeze(1).expand(-1, 3, -1, -1) for t in m.lin2(x)[..., :8].chunk(2, -1))
    return x + joined(F.scaled_dot_product_attention(heads(m.lin(x)), *shared, is_causal=True))


def across(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    """Keys of an early layer, values of the last one, none of them projected."""
    return x + joined(
        F.scaled_dot_product_attention(heads(x), heads(past[0]), heads(past[-1]), is_causal=True)
    )


def chained(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    first = attend(m, x)
    q, k, v = heads(m.q(x)), heads(m.k(first)), heads(first * x)
    return x + joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def padding(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    keep = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != 3], 1)
    return x + attend(m, x, ~later(x)[None, None] & keep[:, None, None, :], causal=False)


def slopes(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    i, j = grid(x)
    bias = (-(i - j).abs() * 0.1).to(x.dtype).masked_fill(j > i, NEVER)
    return x + attend(m, x, bias[None, None], causal=False)


def _near(x: Tensor) -> Tensor:
    i, j = grid(x)
    return (i - j).clamp(0, 20)


def trained(bias: Callable[[Subject, Tensor], Tensor], fused: bool = False) -> Layer:
    """Attention with a bias of shape (3, T, T) that is made of parameters and positions."""

    def layer(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
        mask = bias(m, x).masked_fill(later(x), NEVER)
        return x + (attend(m, x, mask, False) if fused else m.weighted(x, (m.scores(x) + mask).softmax(-1)))

    return layer


def trained_slopes(m: Subject, x: Tensor) -> Tensor:
    return -m.scale[:3, None, None] * _near(x)


def trained_table(m: Subject, x: Tensor) -> Tensor:
    return m.table[_near(x)][..., :3].permute(2, 0, 1)


def trained_network(m: Subject, x: Tensor) -> Tensor:
    return m.lin2(torch.tanh(_near(x)[..., None] * m.scale))[..., :3].permute(2, 0, 1)


def relative_keys(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    keys = F.embedding(_near(x), m.table)[..., :4]
    scores = m.scores(x) + torch.einsum("bhid,ijd->bhij", heads(m.lin(x)), keys)
    return x + m.weighted(x, scores.masked_fill(later(x), NEVER).softmax(-1))


def no_grad(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    with torch.no_grad():
        factor = m.lin2(x).exp()
    return x + factor * m.lin(x)


def merged(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    batch, length, width = x.shape
    rows = m.lin(x.transpose(0, 1).reshape(length * batch, width)).tanh()
    return x + rows.view(length, batch, width).transpose(0, 1)


def changed_past(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    """An earlier layer's value is changed in place, after it was read."""
    past[0].flatten(0, 1).add_(0.125)
    return x + past[0] * m.scale


def mlp(m: Subject, x: Tensor, past: list[Tensor], ids: Tensor) -> Tensor:
    return x + F.gelu(m.lin(x)) @ m.lin2.weight


ORDINARY: dict[str, Layer] = {
    "causal": lambda m, x, past, ids: x + attend(m, x),
    "both ways": lambda m, x, past, ids: x + attend(m, x, causal=False),
    "window": lambda m, x, past, ids: x + attend(m, x, ~later(x) & (grid(x)[1] > grid(x)[0] - 5), False),
    "hidden": hidden(lambda i, j: j > i, NEVER),
    "hidden window": hidden(lambda i, j: (j > i) | (j <= i - 7), HUGE),
    "rows that see nothing": hidden(lambda i, j: (j > i) | (j < 2), HUGE),
    "grouped": grouped,
    "across": across,
    "chained": chained,
    "padding": padding,
    "slopes": slopes,
    "trained slopes": trained(trained_slopes),
    "trained table": trained(trained_table),
    "trained network": trained(trained_network),
    "trained mask": trained(trained_table, fused=True),
    "relative keys": relative_keys,
    "merged": merged,
    "no_grad": no_grad,
    "changed past": changed_past,
    "mlp": mlp,
    "shift": lambda m, x, past, ids: x + F.pad(x, (0, 0, 1, 0))[:, :-1] * m.lin.bias,
    "constant": lambda m, x, past, ids: x + x @ (m.lin.weight @ m.lin2.weight.T) * 0.1,
    "data": lambda m, x, past, ids: x * (ids % 3 == 0).unsqueeze(-1) + ids.cumsum(1).unsqueeze(-1) * x / 100,
    "skip": lambda m, x, past, ids: x + past[0] * x,
    "mean": lambda m, x, past, ids: x + x.mean(1, keepdim=True) * m.lin(x),
    "flip": lambda m, x, past, ids: x + x.flip(1),
    "convolution": lambda m, x, past, ids: (
        x + F.conv1d(F.pad(x.mT, (2, 0)), m.table[:36, :1].reshape(12, 1, 3), groups=12).mT
    ),
    "convolution ahead": lambda m, x, past, ids: (
        x + F.conv1d(x.mT, m.table[:36, :1].reshape(12, 1, 3), groups=12, padding=1).mT
    ),
    "running maximum": lambda m, x, past, ids: x + m.lin(x).cummax(1).values,
    "sorted channels": lambda m, x, past, ids: x + m.lin(x).sort(-1).values,
    "positions": lambda m, x, past, ids: x * m.table[ids] + m.table[torch.arange(x.shape[1])],
}


def _norms() -> dict[str, Layer]:
    found: dict[str, Layer] = {
        "rms norm": lambda m, x, past, ids: x + F.rms_norm(m.lin(x), (12,), m.scale),
        "group norm": lambda m, x, past, ids: x + F.group_norm(m.lin(x).flatten(0, 1), 3).view(x.shape),
        "group norm over rows": lambda m, x, past, ids: x + F.group_norm(m.lin(x).mT, 3).mT,
        "normalize": lambda m, x, past, ids: x + F.normalize(m.lin(x), dim=-1) * m.scale,
        "norm by hand": lambda m, x, past, ids: x + m.lin(x) / (m.lin(x).std(-1, keepdim=True) + 0.1),
    }
    return found


def _of(cases: Cases) -> dict[str, Entry]:
    return {f"{cases.kind}: {n}": (_as_layer(block), parts) for n, (block, parts) in cases.menu.items()}


def _as_layer(block: Any) -> Layer:
    return lambda m, x, past, ids: block(m, x, ids)


# By class; a class is drawn first, so that many cases of one do not hide another.
_TABLES = [
    views,
    in_place,
    complex_values,
    scores,
    attention,
    buffers,
    gradients,
    hooks,
    functions,
    situations,
]
# Blocks with which a model may be refused by `transform`.
MAY_BE_REFUSED = {
    f"{m.CASES.kind}: {n}"
    for m in _TABLES
    for n, case in m.CASES.all.items()
    if REFUSED in case.want["transform"].split("|")
}
BLOCKS: dict[str, dict[str, Entry]] = {
    "ordinary": {n: (layer, None) for n, layer in (ORDINARY | _norms()).items()}
}
BLOCKS |= {m.CASES.kind: _of(m.CASES) for m in _TABLES}
RANDOM: dict[str, Entry] = _of(random_ops.CASES)

Loss = Entry
LOSSES: dict[str, dict[str, Loss]] = {
    "ordinary": {
        "the last row": (lambda m, x, past, ids: m.head(x)[:, -1].logsumexp(-1).mean(), None),
        "the last rows": (lambda m, x, past, ids: m.head(x[:, -2:]).square().mean(), None),
        "and a norm": (
            lambda m, x, past, ids: F.cross_entropy(m.head(x).mT, ids) + 0.1 * past[-1].square().mean(),
            None,
        ),
        "two layers": (
            lambda m, x, past, ids: F.cross_entropy(m.head(x).mT, ids) + m.head(past[0]).logsumexp(-1).mean(),
            None,
        ),
        "greatest": (lambda m, x, past, ids: m.head(x).amax((1, 2)).mean(), None),
        "hidden states": (lambda m, x, past, ids: x.tanh().mean(), None),
        "tokens": (
            lambda m, x, past, ids: F.cross_entropy(
                m.head(x)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)
            ),
            None,
        ),
    },
    **{
        c.kind: {f"{c.kind}: {n}": (_as_layer(f), parts) for n, (f, parts) in c.losses.items()}
        for c in (objectives.CASES, complex_values.CASES, buffers.CASES, attention.CASES, hooks.CASES)
    },
}
