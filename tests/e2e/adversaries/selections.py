"""Columns that a row selects: sparse attention with an indexer, sorted scores, thresholds.

Which columns are selected depends on all of them, also on those that a mask hides. Equal scores are told
apart by how many there are, so many of these scores are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WARNED, WHATEVER, Cases
from e2e_subject import NEVER, Subject, grid, heads, joined, later
from torch import Tensor

CASES = Cases("selections")
KEPT = 4  # columns of a row


def index_scores(m: Subject, x: Tensor) -> Tensor:
    """(batch, T, T): weighted sums over heads of what is positive, so that many are equal."""
    found = (heads(m.lin(x)) @ heads(m.lin2(x)).transpose(2, 3)).relu()
    return (found * m.scale[:3, None, None]).sum(1)


def index_scores_by_rows(m: Subject, x: Tensor) -> Tensor:
    """The same with heads behind the rows, and one key for all of them, as in models with an indexer."""
    queries, keys = m.lin(x).unflatten(-1, (3, -1)), m.lin2(x)[..., :4]
    found = torch.matmul(queries, keys.transpose(1, 2).unsqueeze(1)).relu()
    return torch.matmul(m.q(x)[..., :3].unsqueeze(-2), found).squeeze(-2)


def attended(m: Subject, x: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask (batch, 1, T, T) that depends on parameters."""
    q, k, v = (heads(p(x)) for p in (m.q, m.k, m.v))
    return x + joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def without_gradient(function: Any) -> Any:
    def scores(m: Subject, x: Tensor) -> Tensor:
        with torch.no_grad():
            return function(m, x)

    return scores


def selected(scores: Tensor, count: int = KEPT) -> Tensor:
    """(batch, T, T), true where the column is one of the row's largest."""
    places = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, places, True)


def _sparse(scores: Any, count: int = KEPT, sees: Any = later) -> Any:
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        hidden = sees(x)
        found = selected(without_gradient(scores)(m, x).masked_fill(hidden, NEVER), count)
        return attended(m, x, (found & ~hidden)[:, None])

    return block


CASES.block(STREAMED, name="an indexer")(_sparse(index_scores))
CASES.blocks(
    {
        "an indexer with heads behind the rows": _sparse(index_scores_by_rows),
        "one column of each row": _sparse(index_scores, 1),
        "nothing is hidden": _sparse(index_scores, sees=lambda x: torch.zeros_like(later(x))),
    },
    STREAMED,
)
# at this length all columns are selected, in another order
CASES.blocks({"more than there are": _sparse(index_scores, 500)}, STREAMED)


@CASES.block(STREAMED)
def a_mask_of_numbers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(later(x), dtype=x.dtype).masked_fill(later(x), NEVER)
        found = selected(index_scores(m, x) + mask)
        mask = mask.masked_fill(~found, NEVER)
    return attended(m, x, mask[:, None])


@CASES.block(STREAMED)
def scores_that_are_selected(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A gradient goes through the scores that are kept."""
    scores = m.scores(x).masked_fill(later(x), NEVER)
    places = scores.topk(KEPT, -1).indices
    kept = torch.full_like(scores, NEVER).scatter(-1, places, scores.gather(-1, places))
    return x + m.weighted(x, kept.softmax(-1))


@CASES.block(STREAMED)
def values_of_a_selection(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The smallest of the largest is what a score must reach (nearly: equal tokens round differently)."""
    scores = m.scores(x).masked_fill(later(x), -50.0)
    least = scores.topk(KEPT, -1).values[..., -1:]
    return x + m.weighted(x, scores.masked_fill(scores < least - 1e-6, NEVER).softmax(-1))


@CASES.block(STREAMED)
def of_weights_that_are_zero_where_hidden(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Rows with few columns select hidden ones, whose weight is zero, and give them some."""
    weights = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    places = weights.topk(KEPT, -1).indices
    return x + m.weighted(x, weights.scatter(-1, places, 0.3))


@CASES.block(STREAMED)
def sorted_weights(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The largest weight is for the first row, and so on."""
    weights = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    return x + m.weighted(x, weights.sort(-1, descending=True).values)


@CASES.block(STREAMED)
def sorted_and_masked(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A causal mask on sorted weights says nothing of the columns that they were."""
    weights = m.scores(x).softmax(-1).sort(-1).values
    return x + m.weighted(x, weights.masked_fill(later(x), 0.0))


@CASES.block(STREAMED)
def ranks(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """How many columns have a smaller score."""
    places = m.scores(x).masked_fill(later(x), NEVER).argsort(-1).argsort(-1)
    return x + m.weighted(x, places.to(x.dtype) * 0.01)


@CASES.block(STREAMED)
def added_at_selected_places(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    scores = m.scores(x)
    places = scores.masked_fill(later(x), NEVER).topk(KEPT, -1).indices
    more = torch.zeros_like(scores).scatter_add(-1, places, heads(m.lin(x)))
    return x + m.weighted(x, (scores + more).masked_fill(later(x), NEVER).softmax(-1))


@CASES.block(WHATEVER)
def as_many_as_a_share_of_the_length(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    found = selected(without_gradient(index_scores)(m, x).masked_fill(later(x), NEVER), x.shape[1] // 3)
    return attended(m, x, (found & ~later(x))[:, None])


@CASES.block(WARNED)
def a_selection_of_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Expert choice: columns select rows."""
    return x + m.weighted(x, selected(m.scores(x).mT).mT.to(x.dtype))


@CASES.block(WHATEVER)
def a_mask_with_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = index_scores(m, x).masked_fill(later(x), NEVER)
    return attended(m, x, mask[:, None])


@CASES.block(WHATEVER)
def a_mask_of_rows_turned(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    found = selected(without_gradient(index_scores)(m, x).masked_fill(later(x), NEVER))
    return attended(m, x, (found.mT | torch.eye(x.shape[1], dtype=torch.bool))[:, None])


@CASES.block(WHATEVER)
def selected_rows_of_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Keys are gathered, a few for each row."""
    places = without_gradient(index_scores)(m, x).masked_fill(later(x), NEVER).topk(KEPT, -1).indices
    found = m.v(x)[:, None].expand(-1, x.shape[1], -1, -1).gather(2, places[..., None].expand(-1, -1, -1, 12))
    return x + found.mean(2)


@CASES.block(WHATEVER)
def a_column_of_the_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A place beyond the rows so far, for all rows alike."""
    places = torch.full((1, 1, 1, 1), x.shape[1] - 1).expand(x.shape[0], 3, x.shape[1], 1)
    return x + m.scores(x).gather(-1, places).mean(1)


# ---- columns that data picks from rows: a bias by distance


def distance(x: Tensor) -> Tensor:
    i, j = grid(x)
    return i - j


def by_distance(m: Subject, x: Tensor, most: int = 5) -> Tensor:
    """(batch, heads, T, T): for each head a number of each row for each distance up to the most."""
    numbers = m.lin(x).unflatten(-1, (3, 4)).transpose(1, 2) @ m.table[:4, :most]
    return numbers.gather(-1, distance(x).clamp(0, most - 1).expand(x.shape[0], 3, -1, -1))


def _biased(function: Any) -> Any:
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        return x + m.weighted(x, function(m, x, later(x)))

    return block


def far(x: Tensor) -> Tensor:
    return (distance(x) < 0) | (distance(x) >= 5)


CASES.blocks(
    {
        name: _biased(function)
        for name, function in {
            "a bias by distance": lambda m, x, h: (
                (m.scores(x) + by_distance(m, x)).masked_fill(h, NEVER).softmax(-1)
            ),
            "a bias by distance alone": lambda m, x, h: by_distance(m, x).masked_fill(h, NEVER).softmax(-1),
            "a bias of near ones": lambda m, x, h: (
                (m.scores(x) + by_distance(m, x).masked_fill(far(x), 0.0)).masked_fill(h, NEVER).softmax(-1)
            ),
            "a bias under a low mask": lambda m, x, h: (
                (m.scores(x) + by_distance(m, x)).masked_fill(h, torch.finfo(x.dtype).min).softmax(-1)
            ),
            "a bias of all columns": lambda m, x, h: (m.scores(x) + by_distance(m, x)).softmax(-1),
            "a sum of biases": lambda m, x, h: (
                m.scores(x).masked_fill(h, 0.0) / (3 + by_distance(m, x).sum(-1, keepdim=True).square())
            ),
            "the largest bias": lambda m, x, h: (
                by_distance(m, x)
                .masked_fill(h, NEVER)
                .sub(by_distance(m, x).amax(-1, keepdim=True))
                .softmax(-1)
            ),
            "selected by a bias": lambda m, x, h: torch.zeros_like(m.scores(x)).scatter(
                -1, (by_distance(m, x) - 1e-3 * distance(x)).topk(KEPT, -1).indices, 0.3
            ),
            "a bias turned": lambda m, x, h: (
                (m.scores(x) + by_distance(m, x).mT).masked_fill(h, NEVER).softmax(-1)
            ),
        }.items()
    },
    WHATEVER,
)


@CASES.block(WHATEVER)
def a_bias_of_columns(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The numbers are those of the column."""
    numbers = m.lin(x).mT[:, None, :5].expand(-1, 3, -1, -1)
    bias = numbers.gather(-2, distance(x).clamp(0, 4).expand(x.shape[0], 3, -1, -1)[..., :5, :])
    return x + bias.mean((1, 2)).unsqueeze(-1)


@CASES.block(WHATEVER)
def biases_without_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """No product is near: columns are summed, and are all of them."""
    return x * by_distance(m, x).sum(-1).mean(1).unsqueeze(-1)


@CASES.block(WHATEVER)
def words_once_each(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Two results, and the second has more dims than the first."""
    words, places = torch.unique(ids, return_inverse=True)
    return x + m.lin(m.table[words])[places]


# ---- a dim that data decides about


def in_the_place_of_one_row(m: Subject, x: Tensor, squeezed: Any) -> Tensor:
    """Which rows are chosen is data, and it is one."""
    flat = x.flatten(0, 1)
    rows = squeezed((torch.arange(flat.shape[0]) == 1).nonzero())
    chosen = m.lin(flat[rows])
    factor = 2.0 if chosen.dim() == 1 else 3.0
    return flat.index_put((rows,), chosen * factor).view_as(x)


@CASES.block(WARNED)
def one_row_without_a_dim(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return in_the_place_of_one_row(m, x, lambda rows: rows.squeeze())


@CASES.block(WARNED)
def the_dim_of_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return in_the_place_of_one_row(m, x, lambda rows: rows.squeeze(0))


@CASES.block(WHATEVER)
def a_dim_beside_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return in_the_place_of_one_row(m, x, lambda rows: rows.squeeze(-1))
