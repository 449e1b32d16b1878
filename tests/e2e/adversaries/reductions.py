"""Numbers a row that are made of all that it reads: they read as far as the mask, or all columns."""

from __future__ import annotations

import torch
from e2e_adversary import WARNED, Cases
from e2e_subject import HEADS, HUGE, NEVER, WIDTH, Subject, grid, later
from torch import Tensor

CASES = Cases("reductions")


def _gated(x: Tensor, number: Tensor) -> Tensor:
    """Rows times a number of each head and row."""
    return x * (1 + 0.1 * number.transpose(1, 2).repeat_interleave(WIDTH // HEADS, -1))


CASES.blocks(
    {
        "gate by a logsumexp": lambda m, x, ids: _gated(
            x, m.scores(x).masked_fill(later(x), NEVER).logsumexp(-1)
        ),
        "gate by the largest": lambda m, x, ids: _gated(x, m.scores(x).masked_fill(later(x), HUGE).amax(-1)),
        "gate by a sum": lambda m, x, ids: _gated(x, m.scores(x).masked_fill(later(x), 0.0).sum(-1)),
    }
)
CASES.blocks(
    {
        "gate by a mean": lambda m, x, ids: _gated(x, m.scores(x).masked_fill(later(x), 0.0).mean(-1)),
        "gate by the largest of all": lambda m, x, ids: _gated(x, m.scores(x).amax(-1)),
        "gate by a norm": lambda m, x, ids: _gated(x, torch.linalg.vector_norm(m.scores(x), dim=-1)),
    }
)
CASES.blocks(
    {
        "weights over their sum": lambda m, x, ids: m.weighted(
            x, (w := m.scores(x).masked_fill(later(x), NEVER).softmax(-1) ** 2) / w.sum(-1, keepdim=True)
        ),
        "exponentials over their sum": lambda m, x, ids: m.weighted(
            x, (e := m.scores(x).masked_fill(later(x), NEVER).exp()) / e.sum(-1, keepdim=True)
        ),
        "two masks": lambda m, x, ids: _gated(
            m.weighted(x, m.scores(x).masked_fill(later(x), NEVER).softmax(-1)),
            m.scores(x).masked_fill(later(x) | (grid(x)[0] - grid(x)[1] > 3), NEVER).logsumexp(-1),
        ),
    }
)


@CASES.block(name="one set of scores, two masks")
def _one_set_of_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The window of one reader must not limit the other."""
    scores, (i, j) = m.scores(x), grid(x)
    near = scores.masked_fill(later(x) | (i - j > 3), NEVER).logsumexp(-1)
    return _gated(m.weighted(x, scores.masked_fill(later(x), NEVER).softmax(-1)), near)


@CASES.block(name="einsum attention")
def _einsum_attention(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = (p(x).view(*x.shape[:2], HEADS, -1) for p in (m.q, m.k, m.v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(later(x), NEVER)
    return x + torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)


@CASES.block(WARNED)
def gate_by_which_is_largest(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Equal tokens have equal scores: a rounding would decide."""
    place = m.scores(x).masked_fill(later(x), NEVER).argmax(-1)
    return _gated(x, place.to(x.dtype) / x.shape[1])
