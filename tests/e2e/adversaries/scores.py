"""Hand-written attention: what hides a score, and what brings it back.

What is hidden for certain can be streamed causally. Where a later op gives the hidden ones weight, each row
reads all rows; that may be streamed too (all rows), so these cases only ask for the truth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WHATEVER, Cases
from e2e_subject import HUGE, NEVER, Subject, grid, heads, later
from torch import Tensor

CASES = Cases("scores")
Weights = Callable[[Subject, Tensor, Tensor, Tensor], Tensor]


def weights(want: str = WHATEVER, name: str = "") -> Callable[[Weights], Weights]:
    """A decorator for (model, x, scores, hidden) -> weights."""

    def note(function: Weights) -> Weights:
        def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
            return x + m.weighted(x, function(m, x, m.scores(x), later(x)))

        CASES.block(want, name=name or function.__name__.replace("_", " "))(block)
        return function

    return note


def table(want: str, found: dict[str, Weights]) -> None:
    for name, function in found.items():
        weights(want, name)(function)


def causal(x: Tensor) -> Tensor:
    """0 and minus infinity, added."""
    return torch.zeros_like(later(x), dtype=x.dtype).masked_fill(later(x), NEVER)


def huge(x: Tensor) -> Tensor:
    return torch.zeros_like(later(x), dtype=x.dtype).masked_fill(later(x), HUGE)


# Right ways of hiding what is later.
table(
    STREAMED,
    {
        "masked_fill": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1),
        "masked_fill of a huge number": lambda m, x, s, h: s.masked_fill(h, HUGE).softmax(-1),
        "where": lambda m, x, s, h: torch.where(h, NEVER, s).softmax(-1),
        "where, the other way": lambda m, x, s, h: torch.where(~h, s, s.new_tensor(NEVER)).softmax(-1),
        "added": lambda m, x, s, h: (s + causal(x)).softmax(-1),
        "added on the left": lambda m, x, s, h: (causal(x) + s).softmax(-1),
        "subtracted": lambda m, x, s, h: (s - (-causal(x))).softmax(-1),
        "added with alpha": lambda m, x, s, h: torch.add(s, causal(x), alpha=2).softmax(-1),
        "subtracted with alpha": lambda m, x, s, h: torch.sub(s, causal(x), alpha=-2).softmax(-1),
        "added twice": lambda m, x, s, h: (s + causal(x) + causal(x)).softmax(-1),
        "two masks": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).masked_fill(grid(x)[1] < grid(x)[0] - 6, NEVER).softmax(-1)
        ),
        "masked and scaled": lambda m, x, s, h: (s.masked_fill(h, NEVER) * 0.5).softmax(-1),
        "masked and divided": lambda m, x, s, h: (s.masked_fill(h, NEVER) / 3).softmax(-1),
        "zeros after the softmax": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1) * (~h).to(x.dtype),
        "filled after the softmax": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).masked_fill(h, 0),
        "triu of ones": lambda m, x, s, h: s.masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), NEVER
        ).softmax(-1),
        "linear attention": lambda m, x, s, h: s.masked_fill(h, 0.0),
        "sigmoid attention": lambda m, x, s, h: s.masked_fill(h, NEVER).sigmoid(),
        "relu attention": lambda m, x, s, h: s.masked_fill(h, NEVER).relu() / 5,
        "squared relu": lambda m, x, s, h: s.masked_fill(h, 0.0).relu().square(),
        "log_softmax and exp": lambda m, x, s, h: s.masked_fill(h, NEVER).log_softmax(-1).exp(),
        "softcap before the mask": lambda m, x, s, h: (5 * (s / 5).tanh()).masked_fill(h, NEVER).softmax(-1),
        "ALiBi": lambda m, x, s, h: (s - distance(x) * 0.3 + causal(x)).softmax(-1),
        "ALiBi by heads": lambda m, x, s, h: (
            s - distance(x) * torch.tensor([0.1, 0.3, 0.5])[:, None, None] + causal(x)
        ).softmax(-1),
        "a window": lambda m, x, s, h: s.masked_fill(h | (distance(x) > 4), NEVER).softmax(-1),
        "dilated": lambda m, x, s, h: s.masked_fill(h | (distance(x) % 3 != 0), NEVER).softmax(-1),
        "in blocks of five": lambda m, x, s, h: s.masked_fill(
            h | (grid(x)[0] // 5 != grid(x)[1] // 5), NEVER
        ).softmax(-1),
        "dropout of nothing": lambda m, x, s, h: F.dropout(s.masked_fill(h, NEVER).softmax(-1), 0.0),
        "a threshold": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) * (s.masked_fill(h, NEVER).softmax(-1) > 0.05)
        ),
    },
)

# Right as well, and run whole: reductions over columns and `tril` of scores have no rule.
table(
    WHATEVER,
    {
        "tril after sigmoid": lambda m, x, s, h: s.sigmoid().tril(),
        "linear attention by tril": lambda m, x, s, h: s.tril() * 0.2,
        "softmax by hand": lambda m, x, s, h: _by_hand(s.masked_fill(h, NEVER)),
        "softmax by hand, filled with 0": lambda m, x, s, h: _normalised(s.exp().masked_fill(h, 0.0)),
        "softmax1": lambda m, x, s, h: _softmax1(s.masked_fill(h, NEVER)),
        "logsumexp": lambda m, x, s, h: (
            s.masked_fill(h, NEVER) - s.masked_fill(h, NEVER).logsumexp(-1, keepdim=True)
        ).exp(),
        "max subtracted": lambda m, x, s, h: (
            s.masked_fill(h, NEVER) - s.masked_fill(h, NEVER).amax(-1, keepdim=True)
        ).softmax(-1),
        "a sink": lambda m, x, s, h: _with_sink(m, s.masked_fill(h, NEVER)),
        "double normalisation by rows": lambda m, x, s, h: _normalised(
            s.masked_fill(h, NEVER).softmax(-1).square()
        ),
    },
)


def distance(x: Tensor) -> Tensor:
    i, j = grid(x)
    return (i - j).abs()


def _by_hand(s: Tensor) -> Tensor:
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def _normalised(e: Tensor) -> Tensor:
    return e / (e.sum(-1, keepdim=True) + 1e-3)


def _softmax1(s: Tensor) -> Tensor:
    top = s.amax(-1, keepdim=True).clamp_min(0)
    e = (s - top).exp()
    return e / (e.sum(-1, keepdim=True) + (-top).exp())


def _with_sink(m: Subject, s: Tensor) -> Tensor:
    sink = m.scale[:3].view(1, 3, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
    return torch.cat([s, sink], -1).softmax(-1)[..., :-1]


# What brings back what was hidden, or never hid it.
table(
    WHATEVER,
    {
        "softmax of a softmax": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).softmax(-1),
        "softmax of a sigmoid": lambda m, x, s, h: s.masked_fill(h, NEVER).sigmoid().softmax(-1),
        "a softmax times another": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1) * s.softmax(-1),
        "a softmax over another": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) / s.masked_fill(h, NEVER).softmax(-1).add(0.1)
        ),
        "one over a softmax": lambda m, x, s, h: 1 / (s.masked_fill(h, NEVER).softmax(-1) + 1),
        "softmax plus one": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1) + 0.01,
        "softmax minus a mean": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) - s.masked_fill(h, NEVER).softmax(-1).mean(-1, keepdim=True)
        ),
        "cos of a softmax": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).cos() / 9,
        "exp of a softmax": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).exp() / 9,
        "softmax to the power 0": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).pow(0) / 9,
        "softmax to the power -1": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1).add(1e-2).pow(-1) / 99
        ),
        "clamped from below": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).clamp_min(0.02),
        "scores clamped after the mask": lambda m, x, s, h: s.masked_fill(h, NEVER).clamp(min=-3).softmax(-1),
        "maximum with a number": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).maximum(s.new_tensor(-2.0)).softmax(-1)
        ),
        "nan_to_num of the scores": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).nan_to_num(neginf=-1.0).softmax(-1)
        ),
        "softcap after the mask": lambda m, x, s, h: (5 * (s.masked_fill(h, NEVER) / 5).tanh()).softmax(-1),
        "masked with a moderate number": lambda m, x, s, h: s.masked_fill(h, -4.0).softmax(-1),
        "masked with minus 1e4": lambda m, x, s, h: s.masked_fill(h, -1e4).softmax(-1),
        "huge, scaled to nothing": lambda m, x, s, h: (s.masked_fill(h, HUGE) * 1e-308).softmax(-1),
        "huge, by a tiny temperature": lambda m, x, s, h: (s.masked_fill(h, HUGE) / 1e308).softmax(-1),
        "huge, added and taken away": lambda m, x, s, h: (s + huge(x) - huge(x)).softmax(-1),
        "added with another sign": lambda m, x, s, h: (s - 1e3 * h + 1e3 * h).softmax(-1),
        "alpha is 0": lambda m, x, s, h: torch.add(s, huge(x), alpha=0).softmax(-1),
        "alpha is -1": lambda m, x, s, h: torch.add(s, huge(x), alpha=-1).softmax(-1),
        "alpha is tiny": lambda m, x, s, h: torch.add(s, huge(x), alpha=1e-308).softmax(-1),
        "sub of the mask": lambda m, x, s, h: torch.sub(s, huge(x)).softmax(-1),
        "rsub of the scores": lambda m, x, s, h: torch.rsub(huge(x), s).softmax(-1),
        "the mask, negated": lambda m, x, s, h: (s + -huge(x)).softmax(-1),
        "the scores, negated": lambda m, x, s, h: (-s.masked_fill(h, HUGE)).softmax(-1),
        "the absolute scores": lambda m, x, s, h: s.masked_fill(h, HUGE).abs().mul(1e-308).softmax(-1),
        "huge, squared": lambda m, x, s, h: (-s.masked_fill(h, -1e3).square()).softmax(-1),
        "multiplied by the mask": lambda m, x, s, h: (s * ~h).softmax(-1),
        "multiplied after hiding": lambda m, x, s, h: (s.masked_fill(h, -1e4) * (~h)).softmax(-1),
        "reversed columns": lambda m, x, s, h: (s + causal(x).flip(-1).flip(-1)).softmax(-1),
        "reversed mask": lambda m, x, s, h: (s + causal(x).flip(-1).flip(-2)).softmax(-1),
        "transposed mask": lambda m, x, s, h: (s + causal(x).mT).softmax(-1),
        "transposed scores": lambda m, x, s, h: s.masked_fill(h, HUGE).mT.softmax(-1),
        "transposed weights": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).mT,
        "rolled weights": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).roll(1, -1),
        "rolled mask": lambda m, x, s, h: s.masked_fill(h.roll(1, -1), HUGE).softmax(-1),
        "flipped weights": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).flip(-1),
        "softmax over the rows": lambda m, x, s, h: s.masked_fill(h, HUGE).softmax(-2),
        "rows, then columns": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).softmax(-2),
        "normalised by columns": lambda m, x, s, h: _columns(s.masked_fill(h, NEVER).softmax(-1)),
        "sinkhorn": lambda m, x, s, h: _normalised(_columns(_normalised(s.exp().masked_fill(h, 0.0)))),
        "cumulative along columns": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).cumsum(-1) / 5,
        "cumulative along rows": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).cumsum(-2) / 9,
        "cumulative from the end": lambda m, x, s, h: s.masked_fill(h, 0.0).flip(-1).cumsum(-1).flip(-1) / 9,
        "softmax before the mask": lambda m, x, s, h: s.softmax(-1).masked_fill(h, 0.0),
        "softmax before the mask, renormalised": lambda m, x, s, h: _normalised(
            s.softmax(-1).masked_fill(h, 0.0)
        ),
        "max over all scores": lambda m, x, s, h: (s - s.amax(-1, keepdim=True)).exp().masked_fill(h, 0.0),
        "mean over all scores": lambda m, x, s, h: (
            (s - s.mean(-1, keepdim=True)).masked_fill(h, NEVER).softmax(-1) * s.mean(-1, keepdim=True)
        ),
        "std over all scores": lambda m, x, s, h: (
            (s / s.std(-1, keepdim=True)).masked_fill(h, NEVER).softmax(-1)
        ),
        "layer norm over scores": lambda m, x, s, h: (
            F.layer_norm(s, (s.shape[-1],)).masked_fill(h, NEVER).softmax(-1)
        ),
        "mask undone for some": lambda m, x, s, h: torch.where(
            h & (distance(x) < 3), s, s.masked_fill(h, NEVER)
        ).softmax(-1),
        "mask undone by where": lambda m, x, s, h: torch.where(
            s.masked_fill(h, NEVER) > -1, s.masked_fill(h, NEVER), s
        ).softmax(-1),
        "isinf of the mask": lambda m, x, s, h: s.masked_fill(h, NEVER).isinf().to(x.dtype) / 9 + s * 0.01,
        "equal to zero": lambda m, x, s, h: (s.masked_fill(h, NEVER).softmax(-1) == 0).to(x.dtype) * s * 0.1,
        "later ones alone": lambda m, x, s, h: s.masked_fill(~h, HUGE).softmax(-1),
        "the mask, inverted": lambda m, x, s, h: s.masked_fill(h.logical_not(), HUGE).softmax(-1),
        "the mask, xored": lambda m, x, s, h: s.masked_fill(h ^ (distance(x) == 1), HUGE).softmax(-1),
        "the mask, or and and": lambda m, x, s, h: s.masked_fill(
            (h | (distance(x) > 9)) & (distance(x) > 1), HUGE
        ).softmax(-1),
        "one row ahead": lambda m, x, s, h: s.masked_fill(h.triu(2), NEVER).softmax(-1),
        "tril of one ahead": lambda m, x, s, h: s.sigmoid().tril(1) / 5,
        "triu of the scores": lambda m, x, s, h: s.sigmoid().triu() / 5,
        "tril of the transpose": lambda m, x, s, h: s.sigmoid().mT.tril().mT / 5,
        "tril and triu": lambda m, x, s, h: s.sigmoid().tril().triu(-3),
        "tril plus triu": lambda m, x, s, h: s.tril().sigmoid() + s.triu().sigmoid() * 0.1,
        "sigmoid of tril": lambda m, x, s, h: s.tril().sigmoid() / 9,
        "prefix LM": lambda m, x, s, h: s.masked_fill(h & (grid(x)[1] >= 7), NEVER).softmax(-1),
        "block diagonal, both ways": lambda m, x, s, h: s.masked_fill(
            grid(x)[0] // 6 != grid(x)[1] // 6, NEVER
        ).softmax(-1),
        "both ways within a window": lambda m, x, s, h: s.masked_fill(distance(x) > 3, NEVER).softmax(-1),
        "global rows": lambda m, x, s, h: s.masked_fill(h & (grid(x)[0] != 4), NEVER).softmax(-1),
        "a mask of a random tensor": lambda m, x, s, h: (
            s + torch.where(torch.arange(x.shape[1]) % 2 == 0, 0.0, -1e3).to(x.dtype)
        ).softmax(-1),
        "rows that see nothing": lambda m, x, s, h: s.masked_fill(h | (grid(x)[1] < 3), HUGE).softmax(-1),
        "rows that see nothing, nan to 0": lambda m, x, s, h: (
            s.masked_fill(h | (grid(x)[1] < 3), NEVER).softmax(-1).nan_to_num(0.0)
        ),
        "rows that see nothing, by hand": lambda m, x, s, h: _normalised(
            s.exp().masked_fill(h | (grid(x)[1] < 3), 0.0)
        ),
        # tokens that occur twice have the same keys: which is larger would be left to rounding
        "top k of the scores": lambda m, x, s, h: _top((s + grid(x)[1] / 100).masked_fill(h, NEVER)),
        "sorted scores": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).sort(-1).values,
        "argmax": lambda m, x, s, h: (
            F.one_hot(s.masked_fill(h, NEVER).argmax(-1), x.shape[1]) * s.masked_fill(h, 0.0)
        ),
        "gathered columns": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1)[
            ..., torch.arange(x.shape[1] - 1, -1, -1)
        ],
        "index of a swapped mask": lambda m, x, s, h: s.masked_fill(
            h[torch.arange(x.shape[1]).flip(0)], HUGE
        ).softmax(-1),
        "two steps of attention": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) @ s.masked_fill(h, NEVER).softmax(-1)
        ),
        "weights times their transpose": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) @ s.masked_fill(h, NEVER).softmax(-1).mT / 3
        ),
        "dropout of the mask": lambda m, x, s, h: (s + F.dropout(causal(x), 0.0)).softmax(-1),
        "across heads": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1).transpose(1, 3) @ m.table[:3, :3]
        ).transpose(1, 3),
        "talking heads": lambda m, x, s, h: torch.einsum(
            "bhij,hg->bgij", s.masked_fill(h, NEVER).softmax(-1), m.table[:3, :3]
        ),
        "talking heads before the softmax": lambda m, x, s, h: (
            torch.einsum("bhij,hg->bgij", s, m.table[:3, :3]) + causal(x)
        ).softmax(-1),
        "relative positions by a shift": lambda m, x, s, h: (s + _relative(m, x) + causal(x)).softmax(-1),
        "relative positions by a table": lambda m, x, s, h: (
            s + m.table[(grid(x)[0] - grid(x)[1]).clamp(0, 20)][..., :3].permute(2, 0, 1) + causal(x)
        ).softmax(-1),
        "convolved scores": lambda m, x, s, h: F.conv2d(
            s.masked_fill(h, 0.0), m.table[:9, :9].reshape(3, 3, 3, 3) * 0.1, padding=1
        ),
        "padded and cut": lambda m, x, s, h: F.pad(s.masked_fill(h, NEVER).softmax(-1), (1, 0))[..., :-1],
        "padded and cut, ahead": lambda m, x, s, h: F.pad(s.masked_fill(h, NEVER).softmax(-1), (0, 1))[
            ..., 1:
        ],
        "lerp of two": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1).lerp(s.softmax(-1), 0.2),
        "add of two weights": lambda m, x, s, h: s.masked_fill(h, NEVER).softmax(-1) + 0.1 * s.softmax(-1),
        "add of two masked weights": lambda m, x, s, h: (
            s.masked_fill(h, NEVER).softmax(-1) - 0.3 * s.masked_fill(h, 0.0)
        ),
        "logaddexp": lambda m, x, s, h: torch.logaddexp(s.masked_fill(h, NEVER), s - 3).softmax(-1),
        "minimum with a mask": lambda m, x, s, h: torch.minimum(s, causal(x) + 9).softmax(-1),
        "maximum with a mask": lambda m, x, s, h: torch.maximum(s, causal(x)).softmax(-1),
        "softplus of minus infinity": lambda m, x, s, h: F.softplus(s.masked_fill(h, NEVER)) / 9,
        "threshold": lambda m, x, s, h: F.threshold(s.masked_fill(h, NEVER), 0.0, 0.1),
        "hardtanh": lambda m, x, s, h: F.hardtanh(s.masked_fill(h, NEVER)) / 9,
        "elu": lambda m, x, s, h: F.elu(s.masked_fill(h, NEVER)) / 9,
        "gelu of a huge number": lambda m, x, s, h: F.gelu(s.masked_fill(h, -1e9)) / 9,
        "a mask of another shape": lambda m, x, s, h: (s + causal(x)[None, None, :1]).softmax(-1),
        "a mask for columns": lambda m, x, s, h: s.masked_fill(h[3][None, :], HUGE).softmax(-1),
    },
)


def _columns(w: Tensor) -> Tensor:
    return w / (w.sum(-2, keepdim=True) + 1e-3)


def _top(s: Tensor) -> Tensor:
    least = s.topk(2, -1).values[..., -1:]
    return s.masked_fill(s < least, NEVER).softmax(-1)


def _relative(m: Subject, x: Tensor) -> Tensor:
    """Transformer-XL: a product with embeddings of distances, shifted by pad and view."""
    length = x.shape[1]
    r = heads(m.lin(x)) @ m.table[:length, :4].flip(0).T
    padded = F.pad(r, (1, 0)).view(*r.shape[:2], length + 1, length)
    return padded[:, :, 1:].reshape(r.shape)


# ---- columns before rows, and heads that have changed places: a mask that is met there is read another way


def turned(weights: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Subject, Tensor, Tensor], Tensor]:
    """A block whose weights are made of scores of (columns, rows)."""

    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        return x + m.weighted(x, weights(m.scores(x).mT, later(x)).mT)

    return block


for _name, _weights in {
    "turned, filled with a huge number": lambda s, hidden: s.masked_fill(hidden, HUGE).softmax(-2),
    "turned, filled the right way": lambda s, hidden: s.masked_fill(hidden.mT, HUGE).softmax(-2),
    "turned, filled with zeros": lambda s, hidden: s.masked_fill(hidden, 0.0) * 0.1,
    "turned, times a mask": lambda s, hidden: s * ~hidden * 0.1,
    "turned, chosen": lambda s, hidden: torch.where(hidden, NEVER, s).sigmoid() * 0.1,
}.items():
    CASES.block(WHATEVER, name=_name)(turned(_weights))


@CASES.block(WHATEVER)
def masks_of_heads_that_change_places(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Two masks, each for some of (2, 2) heads, which are transposed in between."""
    b, t, _ = x.shape
    q, k, v = (p(x).view(b, t, 4, 3).transpose(1, 2) for p in (m.lin, m.lin2, m.v))
    head = torch.arange(2)[:, None, None, None]
    s = (q @ k.mT).view(b, 2, 2, t, t).masked_fill(later(x) & (head == 1), NEVER)
    s = s.transpose(1, 2).masked_fill(later(x) & (head != 1), NEVER)
    return x + (s.softmax(-1).reshape(b, 4, t, t) @ v).transpose(1, 2).reshape(x.shape)


@CASES.block(WHATEVER)
def complex_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = (torch.view_as_complex(heads(p(x)).unflatten(-1, (-1, 2))) for p in (m.lin, m.lin2))
    s = q @ k.mT
    s = torch.where(later(x), torch.zeros((), dtype=s.dtype), s)
    return x + m.weighted(x, s.real * 0.1)


@CASES.block(WHATEVER)
def one_more_column(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = m.scores(x).masked_fill(later(x), NEVER)
    return x + m.weighted(x, F.pad(s, (1, 0)).softmax(-1)[..., 1:])


@CASES.block(WHATEVER)
def fewer_heads_and_padded(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = m.scores(x).masked_fill(later(x), NEVER)[:, 1:]
    y = s.softmax(-1) @ heads(m.v(x))[:, 1:]
    return x + F.pad(y, (0, 0, 0, 0, 1, 0)).transpose(1, 2).flatten(2)
