"""Losses of many kinds: weights, smoothing, soft targets, preferences, vectors, other ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, STREAMED, WHATEVER, Cases
from e2e_subject import VOCAB, Subject, token_loss
from torch import Tensor, nn

CASES = Cases("losses")


def flat(m: Subject, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return m.head(x)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)


def soft(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Targets that are probabilities, (batch, T, vocabulary)."""
    return F.one_hot(ids, VOCAB).to(x.dtype) * 0.8 + 0.2 / VOCAB


def class_weights(x: Tensor) -> Tensor:
    return torch.linspace(0.2, 2, VOCAB, dtype=x.dtype)


_ENTROPIES = {
    "label smoothing": {"label_smoothing": 0.1},
    "ignore_index 0": {"ignore_index": 0},
    "smoothing and ignore_index 0": {"label_smoothing": 0.1, "ignore_index": 0},
    "smoothing and ignore_index 7": {"label_smoothing": 0.3, "ignore_index": 7},
    "weights": {"weight": 1},
    "weights and smoothing": {"weight": 1, "label_smoothing": 0.2},
    "weights, smoothing, ignore_index 0": {"weight": 1, "label_smoothing": 0.2, "ignore_index": 0},
    "a sum": {"reduction": "sum"},
    "a sum with smoothing and weights": {"reduction": "sum", "label_smoothing": 0.2, "weight": 1},
    "a weight of 0": {"weight": 0},
    "smoothing of 1": {"label_smoothing": 1.0},
}


def _entropy(settings: dict, way: str):
    def loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        more = dict(settings)
        if "weight" in more:
            more["weight"] = class_weights(x) * (torch.arange(VOCAB) != 3 if more["weight"] == 0 else 1)
        if way == "rows":
            return F.cross_entropy(*flat(m, x, ids), **more)
        if way == "classes second":
            return F.cross_entropy(m.head(x).transpose(1, 2), ids, **more)
        each = F.cross_entropy(*flat(m, x, ids), **{**more, "reduction": "none"})
        return (each * torch.linspace(0, 1, each.numel(), dtype=x.dtype)).sum() / 9

    return loss


for _name, _settings in _ENTROPIES.items():
    for _way in ("rows", "classes second", "none"):
        if not (_way == "none" and "reduction" in _settings):
            CASES.loss(name=f"cross entropy, {_name}, {_way}")(_entropy(_settings, _way))


def _soft(reduction: str, settings: dict, second: bool):
    def loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        more = {**settings, **({"weight": class_weights(x)} if "weight" in settings else {})}
        if second:
            got = F.cross_entropy(m.head(x).mT, soft(m, x, ids).mT, reduction=reduction, **more)
        else:
            got = F.cross_entropy(
                m.head(x).flatten(0, 1), soft(m, x, ids).flatten(0, 1), reduction=reduction, **more
            )
        return got if got.dim() == 0 else got.square().mean()

    return loss


for _reduction in ("mean", "sum", "none"):
    for _second in (False, True):
        for _name, _settings in {
            "": {},
            ", smoothed": {"label_smoothing": 0.1},
            ", weighted": {"weight": 1},
        }.items():
            _where = ", classes second" if _second else ""
            CASES.loss(WHATEVER, name=f"probabilities as targets, {_reduction}{_name}{_where}")(
                _soft(_reduction, _settings, _second)
            )


@CASES.loss()
def nll_with_weights(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    return F.nll_loss(logits.log_softmax(-1), targets, class_weights(x), ignore_index=2)


@CASES.loss(WHATEVER)
def nothing_counts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A sum over no token at all, beside another loss; eager's is 0."""
    logits, targets = flat(m, x, ids)
    return F.cross_entropy(logits, torch.full_like(targets, -100), reduction="sum") + x.square().mean()


@CASES.loss()
def z_loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    return F.cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


@CASES.loss()
def softcapped_logits(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    return F.cross_entropy(3 * (logits / 3).tanh(), targets)


@CASES.loss()
def focal(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    p = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    return (-((1 - p) ** 2) * p.log()).mean()


@CASES.loss()
def loss_by_hand(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    top = logits.max(-1, keepdim=True).values
    z = (logits - top).exp().sum(-1).log() + top[:, 0]
    keep = targets != 4
    return ((z - logits[torch.arange(len(targets)), targets]) * keep).sum() / keep.sum()


@CASES.loss(WHATEVER)
def picked_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The rows that count are gathered: their number depends on the data."""
    logits, targets = flat(m, x, ids)
    return F.cross_entropy(logits[targets != 4], targets[targets != 4])


@CASES.loss(WHATEVER)
def logits_of_rows_that_count(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    rows = x[:, :-1][ids[:, 1:] != 4]
    return F.cross_entropy(m.head(rows), ids[:, 1:][ids[:, 1:] != 4])


@CASES.loss()
def binary_of_logits(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(m.head(x), soft(m, x, ids), pos_weight=class_weights(x))


@CASES.loss(WHATEVER)
def binary(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.binary_cross_entropy(m.head(x).sigmoid(), soft(m, x, ids), reduction="sum") / 100


@CASES.loss()
def mean_squares(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return (
        F.mse_loss(m.head(x), soft(m, x, ids)) + F.smooth_l1_loss(x, m.table[ids]) + F.l1_loss(x, x.flip(-1))
    )


# One of them looks at its values, which breaks the graph.
BREAKS = {"compile": WHATEVER, "transform": f"{WHATEVER}|{REFUSED}"}


@CASES.loss(BREAKS)
def huber_and_others(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = F.normalize(x, dim=-1)
    cosine = F.cosine_embedding_loss(x.flatten(0, 1), m.table[ids].flatten(0, 1), (ids % 2 * 2 - 1).flatten())
    return F.huber_loss(x, y, delta=0.3) + cosine + F.gaussian_nll_loss(x, y, x.square() + 0.1)


@CASES.loss(WHATEVER)
def margins(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = flat(m, x, ids)
    return F.multi_margin_loss(logits, targets) + F.margin_ranking_loss(
        logits[:, 0], logits[:, 1], torch.ones(len(targets), dtype=x.dtype), margin=0.2
    )


@CASES.loss(WHATEVER)
def divergence(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    p = m.head(x).log_softmax(-1)
    q = (m.table[ids] @ m.head.weight.T).log_softmax(-1).detach()
    return F.kl_div(p, q, log_target=True, reduction="batchmean") + F.kl_div(q, p.exp(), reduction="sum") / 50


@CASES.loss(WHATEVER)
def jensen_shannon(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    p = m.head(x).softmax(-1)
    q = (m.table[ids] @ m.head.weight.T).softmax(-1)
    mean = ((p + q) / 2).log()
    return (F.kl_div(mean, p, reduction="none") + F.kl_div(mean, q, reduction="none")).sum(-1).mean()


def chosen(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = m.head(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return each * (ids[:, 1:] != 4)


@CASES.loss()
def preference(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """DPO over a batch of which the first sample is chosen."""
    each = chosen(m, x, ids).sum(1)
    return -F.logsigmoid(0.1 * (each[:1] - each[1:])).mean()


@CASES.loss(WHATEVER)
def preference_by_means(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """SimPO and ORPO: means over each sample's own tokens."""
    mean = chosen(m, x, ids).sum(1) / (ids[:, 1:] != 4).sum(1)
    odds = mean - torch.log1p(-mean.exp())
    return -F.logsigmoid(odds[0] - odds[1:]).mean() - mean[0]


@CASES.loss(WHATEVER)
def policy_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Clipped ratios, with an entropy and a value."""
    each = chosen(m, x, ids)
    ratio = (each - each.detach()).exp()
    advantage = torch.linspace(-1, 1, x.shape[0], dtype=x.dtype)[:, None]
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    p = m.head(x).log_softmax(-1)
    return -clipped.mean() + 0.01 * (p.exp() * p).sum(-1).mean() + m.lin(x)[..., 0].square().mean()


@CASES.loss(WHATEVER)
def batch_softmax(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """InfoNCE over the samples of a batch."""
    pooled = F.normalize(x.mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.roll(1, 0).T / 0.1, torch.arange(x.shape[0]))


@CASES.loss(WHATEVER)
def norm_of_all(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x.norm() * token_loss(m, x, ids)


@CASES.loss(WHATEVER)
def variance_of_all(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return token_loss(m, x, ids) + x.var() + x.std(1).mean() + x.flatten().median()


@CASES.loss(WHATEVER)
def the_worst_token(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(*flat(m, x, ids), reduction="none")
    return each.max() + each.topk(3).values.mean() + each.logsumexp(0)


@CASES.loss(WHATEVER)
def a_quantile_of_tokens(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(*flat(m, x, ids), reduction="none")
    return (each * (each > each.mean().detach())).mean() + each.quantile(0.7)


@CASES.loss(WHATEVER)
def a_vector_of_tokens(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).transpose(1, 2), ids, reduction="none")


@CASES.loss(WHATEVER)
def a_vector_of_samples(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).transpose(1, 2), ids, reduction="none").mean(1)


@CASES.loss({"compile": STREAMED, "transform": STREAMED})
def a_loss_and_its_tokens(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Both have a gradient."""
    each = F.cross_entropy(*flat(m, x, ids), reduction="none")
    return {"loss": each.mean(), "each": each}


@CASES.loss(WHATEVER)
def losses_in_a_list(m: Subject, x: Tensor, ids: Tensor) -> list[Tensor]:
    return [token_loss(m, x, ids), x.mean(), (m.head(x) ** 2).mean()]


@CASES.loss(WHATEVER)
def a_loss_and_its_parts(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    main, other = token_loss(m, x, ids), x.square().mean()
    return {
        "loss": main + 0.1 * other,
        "main": main.detach(),
        "accuracy": (m.head(x).argmax(-1) == ids).sum(),
    }


@CASES.loss()
def no_mean_over_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.head(x[:, -1]).logsumexp(-1).sum()


@CASES.loss(WHATEVER)
def the_last_token_that_counts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Sequence classification: the row before the padding."""
    last = (ids != 4).int().cumsum(1).argmax(1)
    return F.cross_entropy(m.head(x)[torch.arange(x.shape[0]), last], ids[:, 0])


@CASES.loss(WHATEVER)
def classes_of_a_pool(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x.amax(1) + x.mean(1)), ids[:, 0])


@CASES.loss(WHATEVER)
def several_tokens_ahead(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    total = x.new_zeros(())
    for ahead in (1, 2, 3):
        logits = m.head(m.lin(x) if ahead > 1 else x)[:, :-ahead]
        total = total + F.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten()) / ahead
    return total


@CASES.loss(WHATEVER)
def backwards_too(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The next token, and the one before."""
    logits = m.head(x)
    ahead = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return ahead + F.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


@CASES.loss(WHATEVER)
def every_other_token(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x[:, ::2]).flatten(0, 1), ids[:, ::2].flatten())


@CASES.loss(BREAKS)
def connectionist(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    log_p = m.head(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), x.shape[1])
    return F.ctc_loss(log_p, ids[:, :5].clamp_min(1), lengths, torch.full((x.shape[0],), 5)) / 50


@CASES.loss(WHATEVER)
def gradient_reversal(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = 2 * x.detach() - x
    return token_loss(m, x, ids) + F.cross_entropy(m.head(m.lin(y)).flatten(0, 1), (ids % 3).flatten())


@CASES.loss()
def unlikelihood(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    p = m.head(x).softmax(-1)
    before = F.pad(ids[:, :-1], (1, 0))
    return token_loss(m, x, ids) - torch.log1p(-p.gather(-1, before[..., None])).mean()


@CASES.loss(WHATEVER, parts=lambda: {"crit": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)})
def a_module(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.crit(*flat(m, x, ids))  # type: ignore[operator]


@CASES.loss(WHATEVER, parts=lambda: {"w": torch.linspace(0, 1, VOCAB)})
def weights_of_a_buffer(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(*flat(m, x, ids), weight=m.w)  # type: ignore[arg-type]


@CASES.loss(WHATEVER)
def weights_with_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(*flat(m, x, ids), reduction="none")
    gate = m.lin(x)[:, :-1, 0].flatten().sigmoid()
    return (each * gate).sum() / gate.sum()


@CASES.loss(WHATEVER)
def adaptive(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Class-based softmax: the head of a group, then of a token in it."""
    group = ids // 10
    first = F.cross_entropy(m.lin(x)[..., :2].flatten(0, 1), group.flatten(), reduction="none")
    tails = torch.stack([m.head(x)[..., :10], F.pad(m.head(x)[..., 10:], (0, 1), value=-1e4)], 2)
    tail = tails.gather(2, group[..., None, None].expand(-1, -1, 1, 10))[:, :, 0]
    return (first + F.cross_entropy(tail.flatten(0, 1), (ids % 10).flatten(), reduction="none")).mean()


@CASES.loss()
def squares_of_some_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A loss on logits, another on all log-sum-exps but the last, a third on the last row."""
    logits = m.head(x)
    total = logits.logsumexp(-1)
    return token_loss(m, x, ids) + 0.1 * (total * total)[:, :-1].mean() + 0.2 * (x * x)[:, -1:].mean()
