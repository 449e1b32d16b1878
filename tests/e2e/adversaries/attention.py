"""Attention by hand, beyond ops on scores: products with a base, recurrences, other keys and rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WHATEVER, Cases
from e2e_subject import HUGE, NEVER, Block, Subject, grid, heads, joined, later
from torch import Tensor

from adversaries.scores import causal, distance, huge

CASES = Cases("attention")


def _flat(x: Tensor) -> Tensor:
    return heads(x).flatten(0, 1)


def _baddbmm(base: Callable[[Tensor], Tensor], beta: float, alpha: float, after: Callable[[Tensor], Tensor]):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = _flat(m.lin(x)), _flat(m.lin2(x)), _flat(m.v(x))
        s = torch.baddbmm(base(x), q, k.mT, beta=beta, alpha=alpha)
        return x + joined((after(s) @ v).unflatten(0, (x.shape[0], -1)))

    return block


def _alibi(x: Tensor) -> Tensor:
    return (-distance(x) * 0.2).to(x.dtype)[None]


for _beta in (1.0, 0.5, 2.0):
    CASES.block(STREAMED, name=f"baddbmm with beta {_beta}")(
        _baddbmm(lambda x: causal(x)[None], _beta, 0.4, lambda s: s.softmax(-1))
    )
for _beta in (0.0, -1.0, 1e-308):
    CASES.block(WHATEVER, name=f"baddbmm with beta {_beta}")(
        _baddbmm(lambda x: huge(x)[None], _beta, 0.4, lambda s: s.softmax(-1))
    )
CASES.block(WHATEVER, name="baddbmm of ALiBi, masked afterwards")(
    _baddbmm(
        _alibi,
        1.0,
        0.3,
        lambda s: s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), NEVER).softmax(-1),
    )
)
CASES.block(WHATEVER, name="baddbmm with alpha 0")(
    _baddbmm(lambda x: causal(x)[None], 1.0, 0.0, lambda s: s.softmax(-1))
)


def _of_three_dims(mask: Callable[[Tensor], Tensor]):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
        return x + joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask(x)))

    return block


def _bias_of_heads(x: Tensor) -> Tensor:
    slopes = torch.tensor([0.2, 0.7, 0.1], dtype=x.dtype)
    return (distance(x) * slopes[:, None, None]).masked_fill(later(x), NEVER)


CASES.block(STREAMED, name="attention with one bias for each head")(_of_three_dims(_bias_of_heads))
CASES.block(STREAMED, name="attention with a mask of three dims")(_of_three_dims(lambda x: ~later(x)[None]))


@CASES.block(WHATEVER)
def baddbmm_of_weights(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Weights times values, over a base."""
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1).flatten(0, 1)
    y = torch.baddbmm(_flat(m.lin(x)), w, _flat(m.v(x)), beta=0.5, alpha=-2)
    return x + joined(y.unflatten(0, (x.shape[0], -1)))


@CASES.block(WHATEVER)
def addbmm_over_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.scores(x)[0].masked_fill(later(x), NEVER).softmax(-1)
    return x + torch.addbmm(m.lin(x)[0], w, heads(m.v(x))[0].repeat(1, 1, 3), beta=0.3)


@CASES.block(STREAMED)
def dropout_of_nothing_before_the_softmax(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = F.dropout(m.scores(x).masked_fill(later(x), NEVER), 0.0, True)
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(STREAMED)
def scores_of_one_layer_in_the_next(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """RealFormer: the scores before are added to those of the next attention."""
    s = m.scores(x)
    y = x + m.weighted(x, s.masked_fill(later(x), NEVER).softmax(-1))
    return y + m.weighted(y, (m.scores(y) + s).masked_fill(later(x), NEVER).softmax(-1))


@CASES.block(WHATEVER)
def query_key_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = F.normalize(heads(m.lin(x)), dim=-1), F.normalize(heads(m.lin2(x)), dim=-1)
    s = (q @ k.mT * m.scale[0].exp()).masked_fill(later(x), NEVER)
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(WHATEVER)
def keys_normalised_along_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = heads(m.lin(x)).softmax(-1), heads(m.lin2(x)).softmax(-2)
    return x + joined(q @ (k.mT @ heads(m.v(x))))


@CASES.block(WHATEVER)
def linear_attention_by_cumsum(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = F.elu(m.lin(x)) + 1, F.elu(m.lin2(x)) + 1, m.v(x)
    state = (k[..., None] * v[..., None, :]).cumsum(1)
    top = (q[..., None, :] @ state)[..., 0, :]
    return x + top / ((q * k.cumsum(1)).sum(-1, keepdim=True) + 1)


@CASES.block(WHATEVER)
def retention(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    i, j = grid(x)
    decay = torch.where(j <= i, 0.8 ** (i - j).clamp_min(0).to(x.dtype), 0.0)
    w = m.scores(x) * decay
    return x + m.weighted(x, w / w.abs().sum(-1, keepdim=True).clamp_min(1))


@CASES.block(WHATEVER)
def decay_of_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Forgetting transformer: differences of cumulative log gates as a bias."""
    gate = F.logsigmoid(m.lin(x)[..., :3]).cumsum(1).transpose(1, 2)
    bias = gate[..., :, None] - gate[..., None, :]
    return x + m.weighted(x, (m.scores(x) + bias).masked_fill(later(x), NEVER).softmax(-1))


@CASES.block(WHATEVER)
def stick_breaking(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = m.scores(x)
    keep = F.logsigmoid(-s).masked_fill(later(x), 0.0)
    after = keep.flip(-1).cumsum(-1).flip(-1) - keep
    return x + m.weighted(x, (F.logsigmoid(s) + after).exp().masked_fill(later(x), 0.0))


@CASES.block(WHATEVER)
def differential(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    a = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    b = (-m.scores(x)).masked_fill(later(x), NEVER).softmax(-1)
    return x + m.weighted(x, a - m.scale[0] * b)


@CASES.block(WHATEVER)
def sdpa_with_scores_as_bias(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    bias = (m.scores(x) * 0.2).masked_fill(later(x), NEVER)
    return x + joined(F.scaled_dot_product_attention(heads(x), heads(x), heads(m.v(x)), attn_mask=bias))


@CASES.block(WHATEVER)
def sdpa_with_a_bias_of_padding(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    keep = (ids != 3) | (torch.arange(x.shape[1]) == 0)
    mask = ~later(x)[None, None] & keep[:, None, None]
    return x + joined(F.scaled_dot_product_attention(heads(x), heads(x), heads(m.v(x)), attn_mask=mask))


@CASES.block(WHATEVER)
def sdpa_of_sequences_by_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Attention over heads instead of rows: batch x T is the batch."""
    h = m.lin(x).unflatten(-1, (3, 4))
    return x + F.scaled_dot_product_attention(h, h * m.scale[:4], h).flatten(2)


@CASES.block(WHATEVER)
def keys_shifted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Keys of the next row under a causal mask."""
    k = F.pad(heads(m.lin2(x))[:, :, 1:], (0, 0, 0, 1))
    s = (heads(m.lin(x)) @ k.mT).masked_fill(later(x), NEVER)
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(WHATEVER)
def values_reversed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    return x + joined(w.flip(-1) @ heads(m.v(x)).flip(2))


@CASES.block(WHATEVER)
def queries_reversed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = (heads(p(x)).flip(2) for p in (m.lin, m.lin2, m.v))
    return x + joined(F.scaled_dot_product_attention(q, k, v, is_causal=True).flip(2))


@CASES.block(WHATEVER)
def keys_of_half_the_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    k = heads(m.lin2(x))[:, :, ::2]
    hidden = torch.arange(0, x.shape[1], 2)[None] > torch.arange(x.shape[1])[:, None]
    s = (heads(m.lin(x)) @ k.mT).masked_fill(hidden, NEVER)
    return x + joined(s.softmax(-1) @ heads(m.v(x))[:, :, ::2])


@CASES.block(WHATEVER)
def pooled_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    k = F.avg_pool1d(heads(m.lin2(x)).flatten(0, 1).mT, 2, ceil_mode=True).mT.unflatten(0, (-1, 3))
    return x + joined((heads(m.lin(x)) @ k.mT).softmax(-1) @ k)


@CASES.loss(WHATEVER)
def scores_in_the_loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    loss = F.cross_entropy(m.head(m.weighted(x, w))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss + 0.1 * (w * (w + 1e-6).log()).sum(-1).mean()


@CASES.loss(WHATEVER)
def mean_weight_of_a_column_in_the_loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    loss = F.cross_entropy(m.head(m.weighted(x, w))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss + w.mean((0, 1, 2)).square().sum()


@CASES.loss(WHATEVER)
def weights_as_an_output(m: Subject, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1)
    return F.cross_entropy(m.head(m.weighted(x, w)).flatten(0, 1), ids.flatten()), w.mean(1)


# ---- masks that are made in place


@CASES.block(want=WHATEVER)
def mask_by_setitem(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    mask[later(x)] = float("-inf")
    return x + m.weighted(x, (m.scores(x) + mask).softmax(-1))


@CASES.block(want=WHATEVER)
def mask_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    scores = m.scores(x)
    scores.masked_fill_(later(x), float("-inf"))
    scores -= scores.amax(-1, keepdim=True).detach()
    weights = scores.exp_()
    total = weights.sum(-1, keepdim=True)
    total += 0.1
    return x + m.weighted(x, weights / total)


@CASES.block()
def mask_through_a_view_of_the_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    scores = m.scores(x)
    scores.flatten(0, 1).masked_fill_(later(x), float("-inf"))
    return x + m.weighted(x, scores.softmax(-1))


@CASES.block(want=WHATEVER)
def mask_after_the_softmax_through_a_view(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The softmax is over all columns; the later ones are hidden only afterwards."""
    weights = m.scores(x).softmax(-1) * 0.9
    weights.mT.masked_fill_(later(x).T, 0.0)
    return x + m.weighted(x, weights)


@CASES.block()
def triu_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype)
    mask.triu_(1)
    return x + m.weighted(x, (m.scores(x) + mask).softmax(-1))


@CASES.block(WHATEVER)
def positions_that_overflow(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """In 32 bits a distance of 32 becomes a negative number; up to there the mask is causal."""
    i = torch.arange(x.shape[1], dtype=torch.int32)
    hidden = ~((i[:, None] - i[None, :]) * 2**26 >= 0)
    return x + m.weighted(x, m.scores(x).masked_fill(hidden, NEVER).softmax(-1))


def _heads_first(m: Subject, x: Tensor) -> Tensor:
    """Heads before the samples: (heads * samples, rows, width of a head)."""
    q, k, v = (p(x).unflatten(-1, (3, -1)).permute(2, 0, 1, 3).flatten(0, 1) for p in (m.lin, m.lin2, m.v))
    y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
    return y.unflatten(0, (3, x.shape[0])).permute(1, 2, 0, 3).flatten(2)


@CASES.block(WHATEVER)
def heads_before_samples(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + _heads_first(m, x)


@CASES.block(WHATEVER)
def heads_before_samples_without_a_head_dim(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = (p(x).unflatten(-1, (3, -1)).permute(2, 0, 1, 3).flatten(0, 1) for p in (m.lin, m.lin2, m.v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + y.view(3, x.shape[0], -1, y.shape[-1]).permute(1, 2, 0, 3).flatten(2)


def _fewer(x: Tensor) -> Tensor:
    """Heads of one key and value, (batch, 1, T, 4)."""
    return heads(x)[:, :1]


@CASES.block(STREAMED)
def one_query_head_for_repeated_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = _fewer(m.lin(x)), _fewer(m.lin2(x)).repeat_interleave(3, 1)
    return x + m.weighted(x, (q @ k.mT).masked_fill(later(x), NEVER).softmax(-1))


@CASES.block(STREAMED)
def weights_of_one_head_for_repeated_values(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.scores(x).masked_fill(later(x), NEVER).softmax(-1).mean(1, keepdim=True)
    return x + joined(w @ _fewer(m.v(x)).repeat_interleave(3, 1))


@CASES.block(WHATEVER)
def learned_queries_for_repeated_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = heads(m.table[None, : x.shape[1]]), _fewer(m.lin2(x)).repeat_interleave(3, 1)
    return x + m.weighted(x, (q @ k.mT).masked_fill(later(x), NEVER).softmax(-1))


@CASES.block(WHATEVER)
def repeated_in_five_dims(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = (heads(p(x)).unsqueeze(2) for p in (m.lin, m.lin2, m.v))
    k, v = (t[:, :1].repeat_interleave(3, 1) for t in (k, v))
    return x + joined((((q @ k.mT).masked_fill(later(x), NEVER).softmax(-1)) @ v).squeeze(2))


@CASES.block(WHATEVER)
def keys_that_are_repeated_along_the_sequence(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Every second row, each read twice, under attention of three dims."""
    q, (k, v) = m.lin(x), (p(x[:, ::2]).repeat_interleave(2, 1)[:, : x.shape[1]] for p in (m.lin2, m.v))
    return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


@CASES.block(WHATEVER)
def memory_that_a_sample_lacks(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """More columns, which are masked out by what is added: all of them in the first sample."""
    lacks = torch.zeros(x.shape[0], 1, 1, 1, dtype=x.dtype).index_fill(0, torch.tensor([0]), NEVER)
    more = heads(m.lin(x)) @ heads(m.table[None, :4]).mT + lacks
    s = torch.cat([m.scores(x).masked_fill(later(x), NEVER), more], -1)
    return x + m.weighted(x, s.softmax(-1)[..., : x.shape[1]])


def _attended(m: Subject, x: Tensor, q: int, k: int, v: int, **more: object) -> Tensor:
    """PyTorch's attention of so many heads of queries, keys and values."""
    given = (heads(p(x))[:, :n] for p, n in ((m.lin, q), (m.lin2, k), (m.v, v)))
    y = F.scaled_dot_product_attention(*given, is_causal="attn_mask" not in more, **more)
    return x + joined(y.expand(-1, 3, -1, -1))


# PyTorch broadcasts what the kernels for chunks would read beyond its end.
CASES.block(WHATEVER, name="one key head, broadcast")(lambda m, x, ids: _attended(m, x, 3, 1, 3))
CASES.block(WHATEVER, name="one value head, broadcast")(lambda m, x, ids: _attended(m, x, 3, 3, 1))
CASES.block(STREAMED, name="one key and one value head, broadcast")(
    lambda m, x, ids: _attended(m, x, 3, 1, 1)
)
CASES.block(WHATEVER, name="one query head, broadcast")(lambda m, x, ids: _attended(m, x, 1, 3, 3))
CASES.block(WHATEVER, name="fewer value heads than key heads")(
    lambda m, x, ids: _attended(m, x, 3, 3, 1, enable_gqa=True)
)
CASES.block(WHATEVER, name="fewer key heads than value heads")(
    lambda m, x, ids: _attended(m, x, 3, 1, 3, enable_gqa=True)
)
CASES.block(STREAMED, name="one key and one value head, grouped")(
    lambda m, x, ids: _attended(m, x, 3, 1, 1, enable_gqa=True)
)


@CASES.block(WHATEVER)
def keys_and_values_of_one_sample(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x))[:1], heads(m.v(x))[:1]
    return x + joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@CASES.block(WHATEVER)
def rows_that_see_nothing_under_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Dropout that drops nothing, as hardly anything is as improbable; the first rows are padding."""
    hidden = later(x) | (grid(x)[1] < 3)
    return _attended(m, x, 3, 3, 3, attn_mask=~hidden, dropout_p=1e-18)


def _under_sinks(m: Subject, x: Tensor, number: float) -> Tensor:
    """Weights of scores and one sink a row; the same number hides the first rows' scores and their sinks."""
    s = m.scores(x).masked_fill(later(x) | (grid(x)[1] < 3), number)
    sinks = m.scale[:3, None, None].expand(x.shape[0], -1, x.shape[1], 1)
    sinks = sinks.masked_fill((grid(x)[0] < 3)[None, None], number)
    return torch.cat([s, sinks], -1).softmax(-1)


@CASES.block(WHATEVER)
def sinks_of_rows_that_see_nothing(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Each of what is hidden has the same weight."""
    return x + m.weighted(x, _under_sinks(m, x, HUGE)[..., :-1])


@CASES.block(WHATEVER)
def sinks_without_numbers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Minus infinity hides all of both: NaN, which is made zero."""
    return x + m.weighted(x, _under_sinks(m, x, NEVER).nan_to_num(0)[..., :-1])


@CASES.block(WHATEVER)
def linear_of_a_vector(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A weight of one dim, and a bias of none."""
    return x + F.linear(x, m.scale, m.table[0, 0]).unsqueeze(-1)


def _of_two_sizes(more: bool, mask: Callable[[Tensor], Tensor] | None, **options: object) -> Block:
    """Values with half the channels of the keys, or twice as many, as latent attention has them."""

    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
        v = torch.cat([v, v.sin()], -1) if more else v[..., :2] * v[..., 2:]
        allowed = None if mask is None else mask(x)
        o = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=mask is None, **options)  # type: ignore[arg-type]
        return x + joined(o[..., :4] * o[..., 4:] if more else torch.cat([o, o.tanh()], -1))

    return block


def _seen(x: Tensor) -> Tensor:
    """No row before the third sees anything."""
    return ~later(x) & (grid(x)[0] >= 3)


TWO_SIZES: dict[str, Block] = {
    "fewer channels of values, causal": _of_two_sizes(False, None),
    "more channels of values, causal": _of_two_sizes(True, None),
    "fewer channels of values, a scale": _of_two_sizes(False, None, scale=0.9),
    "more channels of values, a window": _of_two_sizes(True, lambda x: ~later(x) & (distance(x) < 7)),
    "fewer channels of values, rows that see nothing": _of_two_sizes(False, _seen),
    "more channels of values, rows that see nothing": _of_two_sizes(True, _seen),
    "fewer channels of values, a mask of numbers": _of_two_sizes(False, lambda x: causal(x)),
    "more channels of values, a mask of huge numbers": _of_two_sizes(True, lambda x: huge(x)),
}
CASES.blocks(TWO_SIZES)


@CASES.block(name="fewer channels of values, dropout of nothing")
def fewer_channels_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x))[:, :1], heads(m.v(x))[:, :1, :, :3]
    o = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True, enable_gqa=True)
    return x + F.pad(joined(o), (0, 3))
