"""Buffers (and parameters) that the forward reads and changes: once a step, as eager does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WHATEVER, Cases, Record, tokens
from e2e_subject import NEVER, VOCAB, WIDTH, Subject, heads, joined, later, token_loss
from torch import Tensor, nn

CASES = Cases("buffers")
MAYBE = {"want": WHATEVER}


def parts(**found: Any) -> Any:
    return lambda: {k: v() for k, v in found.items()}


COUNTER = parts(steps=lambda: torch.zeros((), dtype=torch.long))
MEAN = parts(mean=lambda: torch.zeros(WIDTH))
SCALAR = parts(peak=lambda: torch.zeros(()))


@CASES.block(**MAYBE, parts=COUNTER)
def counter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.steps += 1
    return x + m.lin(x)


@CASES.block(**MAYBE, parts=COUNTER)
def counter_read_after(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.steps.add_(1)
    return x + m.lin(x) / m.steps


@CASES.block(**MAYBE, parts=COUNTER)
def counter_read_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = m.lin(x) * (0.9**m.steps)
    m.steps.add_(1)
    return x + y


@CASES.block(**MAYBE, parts=COUNTER)
def counter_as_an_attribute(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.steps = m.steps + 1
    return x + m.lin(x) / m.steps


@CASES.block(**MAYBE, parts=MEAN)
def running_mean_of_activations(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return x + h - m.mean


@CASES.block(**MAYBE, parts=MEAN)
def running_mean_read_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x) - m.mean
    m.mean.lerp_(h.detach().mean((0, 1)), 0.1)
    return x + h


@CASES.block(**MAYBE, parts=MEAN)
def running_mean_by_copy(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    m.mean.copy_(0.9 * m.mean + 0.1 * h.detach().mean((0, 1)))
    return x + h * m.mean


@CASES.block(**MAYBE, parts=MEAN)
def running_mean_by_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    m.mean.data.add_(h.data.sum((0, 1)))
    return x + h


@CASES.block(**MAYBE, parts=SCALAR)
def running_max(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    m.peak.copy_(torch.maximum(m.peak, h.detach().abs().max()))
    return x + h / (1 + m.peak)


@CASES.block(**MAYBE, parts=SCALAR)
def fake_quantisation(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    m.peak.mul_(0.5).add_(h.detach().abs().amax() * 0.5)
    step = m.peak / 7
    return x + h + ((h / step).round() * step - h).detach()


@CASES.block(**MAYBE, parts=parts(last=lambda: torch.zeros(2, 40, WIDTH)))
def last_activations_kept(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    m.last[:2, : x.shape[1]] = h[:2].detach()
    return x + h


@CASES.block(**MAYBE, parts=parts(seen=lambda: torch.zeros(19)))
def tokens_counted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.seen.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=m.seen.dtype))
    return x + m.lin(x) * m.seen[ids][..., None] / 9


@CASES.block(**MAYBE, parts=parts(load=lambda: torch.zeros(4)))
def load_of_experts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A bias for balance: read for the choice, changed by the load."""
    gate = m.lin(x)[..., :4].sigmoid()
    chosen = F.one_hot((gate + m.load).argmax(-1), 4).to(x.dtype)
    with torch.no_grad():
        m.load.add_((chosen.mean((0, 1)) - 0.25).sign(), alpha=-0.01)
    y = torch.stack([m.lin2(x), m.v(x), m.q(x), m.k(x)], -1)
    return x + (y * (gate * chosen).unsqueeze(2)).sum(-1)


@CASES.block(**MAYBE, parts=parts(code=lambda: torch.randn(5, WIDTH), size=lambda: torch.ones(5)))
def vector_quantisation(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A codebook that follows its rows, with a straight-through gradient."""
    h = m.lin(x)
    chosen = torch.cdist(h.flatten(0, 1), m.code).argmin(-1)
    with torch.no_grad():
        hot = F.one_hot(chosen, 5).to(h.dtype)
        m.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        m.code.mul_(0.9).add_(hot.T @ h.flatten(0, 1) / (1 + m.size[:, None]), alpha=0.1)
    quantised = m.code[chosen].view(h.shape)
    return x + h + (quantised - h).detach()


@CASES.block(**MAYBE, parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH)))
def batch_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.bn(m.lin(x).transpose(1, 2)).transpose(1, 2)


@CASES.block(**MAYBE, parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH)))
def batch_norm_of_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.bn(m.lin(x).flatten(0, 1)).view(x.shape)


# Its momentum is read from a counter, which breaks the graph.
@CASES.block(
    want={"compile": WHATEVER, "transform": f"{WHATEVER}|{REFUSED}"},
    parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
)
def batch_norm_with_a_counter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.bn(m.lin(x).flatten(0, 1)).view(x.shape)


@CASES.block(**MAYBE, parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)))
def batch_norm_without_statistics(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.bn(m.lin(x).transpose(1, 2)).transpose(1, 2)


@CASES.block(**MAYBE, parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH).eval()))
def batch_norm_frozen(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.bn.eval()
    return x + m.bn(m.lin(x).transpose(1, 2)).transpose(1, 2)


@CASES.block(**MAYBE, parts=parts(n=lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)))
def instance_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.n(m.lin(x).transpose(1, 2)).transpose(1, 2)


@CASES.block(**MAYBE, parts=parts(mean=lambda: torch.zeros(WIDTH), var=lambda: torch.ones(WIDTH)))
def functional_batch_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = F.batch_norm(m.lin(x).flatten(0, 1), m.mean, m.var, m.scale, None, True, 0.2)
    return x + y.view(x.shape)


@CASES.block(**MAYBE, parts=parts(mean=lambda: torch.zeros(WIDTH), var=lambda: torch.ones(WIDTH)))
def batch_norm_twice_with_the_same_statistics(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    x = x + F.batch_norm(m.lin(x).flatten(0, 1), m.mean, m.var, None, None, True, 0.2).view(x.shape)
    x = x + m.attend(x)
    return x + F.batch_norm(m.lin2(x).flatten(0, 1), m.mean, m.var, None, None, True, 0.2).view(x.shape)


@CASES.block(
    **MAYBE, parts=parts(lin3=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
)
def spectral_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin3(x)


@CASES.block(**MAYBE, parts=parts(lin3=lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))))
def spectral_norm_of_old(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin3(x)


@CASES.block(parts=parts(lin3=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))
def weight_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin3(x)


@CASES.block(**MAYBE, parts=parts(embed2=lambda: nn.Embedding(19, WIDTH, max_norm=0.5)))
def embedding_with_max_norm(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The table is renormalised in place, where it is read."""
    return x + m.embed2(ids)


@CASES.block(**MAYBE)
def a_parameter_clamped(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.clamp_(0.95, 1.05)
    return x + m.lin(x) * m.scale


@CASES.block(**MAYBE)
def a_parameter_normalised_by_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.lin.weight.data.div_(m.lin.weight.data.norm(dim=1, keepdim=True))
    return x + m.lin(x)


@CASES.block(**MAYBE)
def a_parameter_changed_after_its_use(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = x + m.scale
    with torch.no_grad():
        m.scale.mul_(0.9)
    return y


@CASES.block(**MAYBE, parts=parts(table2=lambda: torch.randn(64, WIDTH)))
def a_part_of_a_buffer_changed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.table2[: x.shape[1]].mul_(0.9)
    return x + m.lin(m.table2[: x.shape[1]])


@CASES.block(**MAYBE, parts=parts(table2=lambda: torch.randn(64, WIDTH)))
def a_view_of_a_buffer_read_after(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    rows = m.table2[: x.shape[1]]
    m.table2.mul_(0.5)
    return x + m.lin(rows)


@CASES.block(**MAYBE, parts=COUNTER)
def a_schedule_by_a_counter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.steps += 1
    warm = torch.clamp(m.steps / 4, max=1.0)
    s = m.scores(x).masked_fill(later(x), NEVER) * warm
    return x + m.weighted(x, s.softmax(-1))


@CASES.block(parts=parts(offset=lambda: torch.randn(WIDTH)))
def a_buffer_that_is_only_read(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x) * m.offset


@CASES.block(**MAYBE, parts=parts(step=lambda: torch.zeros(())))
def counted_twice_a_step(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    for lin in (m.lin, m.lin2):
        m.step += 1
        x = x + lin(x) * m.step.cos()
        x = x + m.attend(x)
    return x


@CASES.loss(**MAYBE, parts=parts(scale_of_loss=lambda: torch.ones(())))
def a_loss_scaled_by_its_history(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    loss = token_loss(m, x, ids)
    with torch.no_grad():
        m.scale_of_loss.mul_(0.9).add_(loss, alpha=0.1)
    return loss / m.scale_of_loss


@CASES.loss(**MAYBE, parts=parts(centre=lambda: torch.zeros(19)))
def a_centre_of_the_logits(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(x)
    loss = F.cross_entropy((logits - m.centre).flatten(0, 1), ids.flatten())
    m.centre.lerp_(logits.detach().mean((0, 1)), 0.1)
    return loss


@CASES.loss(**MAYBE, parts=parts(queue=lambda: torch.randn(8, WIDTH)))
def a_queue_of_negatives(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    pooled = F.normalize(x.mean(1), dim=-1)
    loss = F.cross_entropy(pooled @ m.queue.clone().T, torch.zeros(x.shape[0], dtype=torch.long))
    m.queue.copy_(torch.cat([pooled.detach(), m.queue])[:8])
    return loss + token_loss(m, x, ids)


@CASES.scenario(**MAYBE, block=counter, parts=COUNTER)
def two_forwards_before_the_backwards(m: Subject, call: Any, record: Record) -> None:
    first, second = call(tokens(2, 33)), call(tokens(2, 20))
    record("steps", m.steps)
    (first + second).backward()
    record.state(m)


@CASES.scenario(**MAYBE, block=running_mean_of_activations, parts=MEAN)
def the_buffer_between_forward_and_backward(m: Subject, call: Any, record: Record) -> None:
    """It is written in the forward, and not once more in the backward."""
    for length in (33, 12):
        loss = call(tokens(2, length))
        record("mean", m.mean)
        loss.backward()
        record("mean", m.mean)
    record.state(m)


@CASES.scenario(**MAYBE, block=batch_norm, parts=parts(bn=lambda: nn.BatchNorm1d(WIDTH)))
def evaluation_between_steps(m: Subject, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.eval()
    with torch.no_grad():
        record("evaluated", call(tokens(2, 33)))
    m.train()
    record.step(m, call, tokens(2, 33))


@CASES.scenario(**MAYBE, block=counter, parts=COUNTER)
def a_forward_without_a_backward(m: Subject, call: Any, record: Record) -> None:
    for length in (33, 20, 33):
        call(tokens(2, length))
        record("steps", m.steps)


@CASES.scenario(block=a_buffer_that_is_only_read, parts=parts(offset=lambda: torch.randn(WIDTH)))
def a_buffer_changed_by_the_user(m: Subject, call: Any, record: Record) -> None:
    for _ in range(2):
        record.step(m, call, tokens(2, 33))
        m.offset.mul_(-1)
    m.offset = torch.ones_like(m.offset)
    record.step(m, call, tokens(2, 33))


# ---- what is done beside the computing of values


@CASES.scenario(
    WHATEVER, block=lambda m, x, ids: (torch._assert_async((ids < 18).all(), "too large"), x + m.lin(x))[1]
)
def an_assertion(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33).clamp_max(17))
    try:
        call(torch.full((2, 33), 18))
    except RuntimeError:
        record("raised", True)


LOGGED: list[float] = []


@torch.library.custom_op("streambp_tests::log", mutates_args=())
def log_op(x: Tensor) -> None:
    LOGGED.append(float(x.sum()))


log_op.register_fake(lambda x: None)


@CASES.scenario(WHATEVER, block=lambda m, x, ids: (log_op(m.lin(x).detach()), x + m.lin(x))[1])
def a_log(m: Any, call: Any, record: Record) -> None:
    LOGGED.clear()
    record.step(m, call, tokens(2, 33))
    record("logged", list(LOGGED))


@CASES.block(WHATEVER)
def a_branch_by_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.cond(ids.sum() > 0, lambda y: m.lin(y), lambda y: m.lin2(y), (x,))


@CASES.block(WHATEVER, parts=lambda: {"count": torch.zeros(WIDTH)})
def a_running_mean_of_hidden_states(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """The buffer is another tensor after each step; its memory of the step is not kept."""
    h = m.lin(x)
    m.count = 0.9 * m.count + h.detach().mean((0, 1))
    return x + h - m.count


@CASES.block(WHATEVER, parts=lambda: {"bn": nn.BatchNorm2d(3)})
def batch_norm_of_heads(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + joined(m.bn(heads(m.lin(x))))


@CASES.block(WHATEVER, parts=lambda: {"embed2": nn.Embedding(VOCAB, WIDTH, max_norm=0.5)})
def an_embedding_of_bounded_norm(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(m.embed2(ids)) + F.embedding(ids, m.table, max_norm=1.0)
