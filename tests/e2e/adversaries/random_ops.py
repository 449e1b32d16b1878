"""Random ops, on rows and on parameters: compared by finite differences with the same random numbers.

What is drawn for a parameter is drawn once a step: where that is all, any chunk gives the same loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import WHATEVER, Cases, Record, tokens
from e2e_subject import NEVER, WIDTH, Subject, heads, joined, later
from torch import Tensor, nn

CASES = Cases("random")
ROWS = {"against": "differences"}
# Random numbers of parameters: the same loss with one chunk as with several.
ONCE = {"want": WHATEVER, "against": "differences, any chunk"}


@CASES.block(**ONCE)
def dropout_of_a_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, F.dropout(m.lin.weight, 0.3), m.lin.bias)


@CASES.block(**ONCE)
def noise_on_a_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, m.lin.weight + 0.3 * torch.randn_like(m.lin.weight))


@CASES.block(**ONCE)
def noise_of_a_learned_size(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Bayes by backprop: a mean, a deviation, and normal numbers."""
    weight = m.lin.weight + F.softplus(m.lin2.weight) * torch.randn(WIDTH, WIDTH, dtype=x.dtype)
    return x + F.linear(x, weight)


@CASES.block(**ONCE)
def drop_connect(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    keep = torch.bernoulli(torch.full_like(m.lin.weight, 0.7))
    return x + F.linear(x, m.lin.weight * keep / 0.7)


@CASES.block(**ONCE)
def a_random_mask_of_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x) * (torch.rand(WIDTH, dtype=x.dtype) < 0.7)


@CASES.block(**ONCE)
def a_random_number(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Stochastic depth of the whole batch."""
    return x + m.lin(x) * (torch.rand(()) < 0.8).to(x.dtype) / 0.8


@CASES.block(**ONCE)
def a_random_number_a_sample(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Stochastic depth of each sample."""
    keep = torch.rand(x.shape[0], 1, 1) < 0.5
    return x + m.lin(x) * keep


@CASES.block(**ONCE)
def locked_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Variational dropout: one mask for all rows."""
    mask = x.new_empty(x.shape[0], 1, WIDTH).bernoulli_(0.7) / 0.7
    return x + m.lin(x * mask)


@CASES.block(**ONCE)
def dropout_of_words(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    keep = torch.rand(m.embed.weight.shape[0], 1) > 0.2
    return x + F.embedding(ids, m.embed.weight * keep)


@CASES.block(**ONCE)
def dropout1d_of_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.dropout1d(m.lin(x).transpose(1, 2), 0.3).transpose(1, 2)


@CASES.block(**ONCE)
def spectral_power_iteration_from_noise(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    u = F.normalize(torch.randn(WIDTH, dtype=x.dtype), dim=0)
    v = F.normalize(m.lin.weight.detach().T @ u, dim=0)
    return x + F.linear(x, m.lin.weight / (u @ m.lin.weight @ v).abs().add(1))


@CASES.block(**ONCE)
def a_random_permutation_of_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x)[..., torch.randperm(WIDTH)]


@CASES.block(**ONCE)
def weights_dropped_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weight = m.lin.weight * 1
    F.dropout(weight, 0.3, True, inplace=True)
    return x + F.linear(x, weight)


@CASES.block(**ONCE)
def gumbel_on_a_parameter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    noise = -torch.empty(WIDTH, dtype=x.dtype).exponential_().log()
    return x * ((m.scale + noise).softmax(-1) * WIDTH)


@CASES.block(**ONCE)
def alpha_dropout_of_a_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, F.alpha_dropout(m.lin.weight, 0.2, True))


@CASES.block(**ONCE)
def the_same_noise_for_two_layers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    noise = torch.randn(WIDTH, dtype=x.dtype)
    y = x + m.lin(x * (1 + 0.1 * noise))
    y = y + m.attend(y)
    return y + m.lin2(y * noise)


# ---- of rows


@CASES.block(want=WHATEVER, **ROWS)
def dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.dropout(m.lin(x), 0.3)


@CASES.block(want=WHATEVER, **ROWS)
def dropout_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    F.dropout(h.flatten(0, 1), 0.3, True, inplace=True)
    return x + h


@CASES.block(want=WHATEVER, **ROWS)
def native_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y, mask = torch.native_dropout(m.lin(x), 0.3, True)
    return x + y + m.lin2(x) * mask


@CASES.block(want=WHATEVER, **ROWS)
def alpha_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.alpha_dropout(m.lin(x), 0.3, True)


@CASES.block(want=WHATEVER, **ROWS)
def feature_alpha_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.feature_alpha_dropout(m.lin(x), 0.3, True)


@CASES.block(want=WHATEVER, **ROWS)
def noise_on_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x) * torch.randn_like(x) + torch.rand_like(x) * m.scale


@CASES.block(want=WHATEVER, **ROWS)
def noise_read_twice(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    y = x + m.lin(x + noise)
    y = y + m.attend(y)
    return y + m.lin2(noise * y)


@CASES.block(want=WHATEVER, **ROWS)
def noise_of_another_shape(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    noise = torch.randn(x.shape[1], WIDTH, dtype=x.dtype)
    return x + m.lin(x) * noise


@CASES.block(want=WHATEVER, **ROWS)
def bernoulli_of_probabilities(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    keep = torch.bernoulli(m.lin(x).detach().sigmoid())
    return x + keep * m.lin2(x)


@CASES.block(want=WHATEVER, **ROWS)
def rrelu(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.rrelu(m.lin(x), training=True)


@CASES.block(want=WHATEVER, **ROWS)
def rrelu_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    F.rrelu(h, training=True, inplace=True)
    return x + h


@CASES.block(want=WHATEVER, **ROWS)
def gumbel_softmax(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.gumbel_softmax(m.lin(x), tau=0.7, dim=-1)


@CASES.block(want=WHATEVER, **ROWS)
def normal_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x) * torch.empty_like(x).normal_(0.0, 0.3) + x.new_zeros(x.shape).uniform_(-1, 1)


@CASES.block(want=WHATEVER, **ROWS)
def dropout_of_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = F.dropout(m.scores(x), 0.3).masked_fill(later(x), NEVER)
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(want=WHATEVER, **ROWS)
def dropout_of_masked_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    s = F.dropout(m.scores(x).masked_fill(later(x), -1e4), 0.3)
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(want=WHATEVER, **ROWS)
def dropout_of_weights_of_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = F.dropout(m.scores(x).masked_fill(later(x), NEVER).softmax(-1), 0.3)
    return x + m.weighted(x, w)


@CASES.block(want=WHATEVER, **ROWS)
def dropout_in_sdpa(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
    return x + joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3))


@CASES.block(want=WHATEVER, **ROWS)
def rows_in_another_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x[:, torch.randperm(x.shape[1])])


@CASES.block(want=WHATEVER, **ROWS)
def samples_in_another_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    mix = torch.rand(())
    return x * mix + m.lin(x)[order] * (1 - mix)


@CASES.block(want=WHATEVER, **ROWS)
def tokens_replaced(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    other = torch.randint_like(ids, 0, 19)
    return x + m.lin(m.embed(torch.where(torch.rand(ids.shape) < 0.2, other, ids)))


@CASES.block(want=WHATEVER, **ROWS)
def experts_with_noise(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    gate = (m.lin(x)[..., :3] + torch.randn(*x.shape[:2], 3, dtype=x.dtype)).softmax(-1)
    return x + gate[..., :1] * m.lin2(x) + gate[..., 1:2] * m.v(x)


@CASES.block(want=WHATEVER, **ROWS)
def multinomial(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    drawn = torch.multinomial(m.head(x).softmax(-1).flatten(0, 1).detach(), 1).view(ids.shape)
    return x + m.embed(drawn) * m.lin(x)


@CASES.block(want=WHATEVER, parts=lambda: {"drop": nn.Dropout(0.3), "cell": nn.Dropout1d(0.4)}, **ROWS)
def dropout_modules(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.drop(m.lin(x)) + m.cell(m.lin2(x))


@CASES.loss(want=WHATEVER, **ROWS)
def noise_in_the_loss(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(F.dropout(x, 0.2))
    logits = logits + 0.1 * torch.randn_like(logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@CASES.loss(want=WHATEVER, **ROWS)
def random_weights_of_tokens(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), reduction="none")
    return (each * torch.rand(each.shape, dtype=x.dtype)).mean()


@CASES.loss(want=WHATEVER, **ROWS)
def two_losses_of_one_dropout(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """R-Drop: two passes of dropout over the same rows."""
    a, b = m.head(F.dropout(x, 0.2)).log_softmax(-1), m.head(F.dropout(x, 0.2)).log_softmax(-1)
    return (
        F.nll_loss(a.flatten(0, 1), ids.flatten())
        + F.kl_div(a, b, log_target=True, reduction="batchmean") / 9
    )


@CASES.scenario(want=WHATEVER, block=lambda m, x, ids: x + F.dropout(m.lin(x), 0.3), against="none")
def the_same_seed_gives_the_same(m: Subject, call: object, record: Record) -> None:
    """Twice with one seed: equal. Two backwards in between change nothing."""
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        m.zero_grad()
        loss = call(tokens(2, 33))  # type: ignore[operator]
        loss.backward()
        losses.append((float(loss.detach()), m.lin.weight.grad.clone()))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])
    loss = call(tokens(2, 33))  # type: ignore[operator]
    assert float(loss.detach()) != losses[0][0], "drawn anew without a seed"


@CASES.scenario(want=WHATEVER, block=lambda m, x, ids: x + m.lin(x))
def the_generator_is_left_alone(m: Subject, call: object, record: Record) -> None:
    """A model that draws nothing takes no random numbers of the user's."""
    for length in (33, 20):
        torch.manual_seed(length)
        record.step(m, call, tokens(2, length))  # type: ignore[arg-type]
        record("random numbers", torch.rand(3))


# ---- ops of which PyTorch does not say that they draw


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


@torch.library.custom_op("streambp_tests::noise", mutates_args=())
def noise_op(x: Tensor) -> Tensor:
    return torch.rand_like(x)


noise_op.register_fake(torch.empty_like)


@CASES.block(want=WHATEVER, **ROWS)
def noise_of_a_custom_function(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + Noisy.apply(m.lin(x)).tanh()


@CASES.block(want=WHATEVER, **ROWS)
def noise_of_a_custom_function_on_a_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, Noisy.apply(m.lin.weight))


@CASES.block(want=WHATEVER, **ROWS)
def noise_of_a_custom_op(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x) * noise_op(m.lin2(x).detach())


@CASES.block(want=WHATEVER, **ROWS)
def noise_of_a_custom_op_on_a_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, m.lin.weight * noise_op(m.lin.weight.detach()))


@CASES.block(want=WHATEVER, **ROWS)
def dropout_of_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Attention that reads all rows: queries and keys are made by different programs."""
    q, k = heads(m.q(F.dropout(x, 0.2))), heads(F.dropout(m.lin(x), 0.3))
    return x + joined(F.scaled_dot_product_attention(q, k, heads(m.v(x))))


@CASES.block()
def dropout_of_everything(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
    y = joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=1.0))
    return x + F.dropout(m.lin(x), 1.0) + y
