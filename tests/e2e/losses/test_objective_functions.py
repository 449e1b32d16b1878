"""Objectives as plain functions around a model: layers and loss are streamed, gradients are exact."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, assert_close_loss, grads, in_double
from e2e_memory import measure
from e2e_models import CHUNK, LOSS_CHUNK, VOCAB, build, sample
from torch import Tensor

import streambp_fx
from streambp_fx.backend import schedules_of
from streambp_fx.measure.live_bytes import live_bytes_compiled

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
Objective = Callable[[Any, Any, Tensor, Tensor], Tensor]


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def weighted(model: Any, _: Any, ids: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy with a weight for each token."""
    logits = model(input_ids=ids).logits
    rows = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (rows.view(ids.shape[0], -1) * weight[:, 1:]).sum() / weight.sum()


def dpo(model: Any, _: Any, ids: Tensor, weight: Tensor) -> Tensor:
    """Chosen and rejected in one batch; the reference's log-probabilities are data."""
    sums = (log_probabilities(model(input_ids=ids).logits, ids) * weight[:, 1:]).sum(1)
    chosen, rejected = (sums + 3.0 * weight.mean(1)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo_in_two_calls(model: Any, reference: Any, ids: Tensor, weight: Tensor) -> Tensor:
    """The model runs twice, and a frozen reference twice as well, in one graph."""

    def margin(m: Any) -> Tensor:
        sums = []
        for part, mask in zip(ids.chunk(2), weight.chunk(2), strict=True):
            sums.append((log_probabilities(m(input_ids=part).logits, part) * mask[:, 1:]).sum(1))
        return sums[0] - sums[1]

    with torch.no_grad():
        expected = margin(reference)
    return -F.logsigmoid(0.1 * (margin(model) - expected)).mean()


def grpo(model: Any, _: Any, ids: Tensor, weight: Tensor) -> Tensor:
    """Clipped ratio and a KL estimate, token by token."""
    new = log_probabilities(model(input_ids=ids).logits, ids)
    old = -4.5 - weight[:, 1:]
    advantage = torch.tensor([1.0, -0.5], dtype=new.dtype)[:, None]
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    gap = 1.01 * old - new
    mask = weight[:, 1:]
    return ((0.04 * (gap.exp() - gap - 1) - gain) * mask).sum() / mask.sum()


def distillation(model: Any, teacher: Any, ids: Tensor, weight: Tensor) -> Tensor:
    """KL divergence against a teacher that runs in the same graph."""
    with torch.no_grad():
        target = teacher(input_ids=ids).logits.log_softmax(-1)
    own = model(input_ids=ids).logits.log_softmax(-1)
    rows = F.kl_div(own, target, log_target=True, reduction="none").sum(-1)
    return (rows * weight).sum() / weight.sum()


# objective -> sweeps over the loss head
SWEEPS: dict[Objective, int] = {weighted: 1, dpo: 2, dpo_in_two_calls: 2, grpo: 1, distillation: 1}


def data(length: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (2, length), generator=gen)
    return ids, torch.rand(2, length, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize("family", sample(["llama", "gemma2"], "llama"))
@pytest.mark.parametrize("objective", sample(SWEEPS, grpo), ids=lambda f: f.__name__)
def test_exact(family: str, objective: Objective) -> None:
    torch._dynamo.reset()
    with in_double(functools.partial(build, family)):
        eager, other = build(family), build(family).requires_grad_(True)
        for parameter in other.parameters():
            parameter.data.mul_(1.1)
        model = copy.deepcopy(eager)
        call = torch.compile(functools.partial(objective, model, other), backend="streambp", options=OPTIONS)
        for length in (67, 80):
            eager.zero_grad()
            want = objective(eager, other, *data(length))
            want.backward()
            model.zero_grad()
            got = call(*data(length))
            got.backward()
            assert_close_loss(got.detach(), want.detach(), 1e-9)
            assert_close_grads(grads(model), grads(eager), 1e-9)
            assert all(p.grad is None for p in other.parameters()), "the teacher gets no gradient"
        schedule = streambp_fx.schedule(model)
        assert schedule.sweeps == SWEEPS[objective] and f"{schedule.sweeps} sweep" in str(schedule)
        left = [s.reason for s in schedule.segments if not s.chunked]
        assert not left, f"{left}\n{schedule}"


@pytest.mark.slow
@pytest.mark.parametrize("objective", sample([dpo, grpo, distillation], dpo), ids=lambda f: f.__name__)
def test_no_logits_are_stored(objective: Objective) -> None:
    """No tensor of sequence times vocabulary; eager has one."""
    torch._dynamo.reset()
    length = 256
    over = {"max_position_embeddings": 512}
    model, other = (build("llama", dtype=torch.float32, **over) for _ in range(2))
    ids, weight = data(length)
    weight = weight.float()
    call = torch.compile(functools.partial(objective, model, other), backend="streambp", options=OPTIONS)

    known = [*model.parameters(), *other.parameters(), ids, weight]
    bound = length * VOCAB
    assert measure(lambda: objective(model, other, ids, weight).backward(), known).widest >= 2 * bound
    call(ids, weight).backward()
    assert 0 < live_bytes_compiled(lambda: call(ids, weight), known).widest < bound


@pytest.mark.slow
def test_inputs_with_a_row_for_each_prediction() -> None:
    """Old log-probabilities and a mask are shorter than the tokens by one; other lengths compile nothing."""
    torch._dynamo.reset()

    def loss(model: Any, ids: Tensor, mask: Tensor, old: Tensor) -> Tensor:
        ratio = (log_probabilities(model(input_ids=ids).logits, ids) - old).exp()
        return -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()

    with in_double(functools.partial(build, "llama")):
        eager, model = build("llama"), build("llama")
        call = torch.compile(loss, backend="streambp", options=OPTIONS)
        for length in (67, 80):
            ids, weight = data(length)
            batch = (ids, weight[:, 1:].contiguous(), -4.5 - weight[:, :-1])
            eager.zero_grad()
            want = loss(eager, *batch)
            want.backward()
            model.zero_grad()
            got = call(model, *batch)
            got.backward()
            assert_close_loss(got.detach(), want.detach(), 1e-9)
            assert_close_grads(grads(model), grads(eager), 1e-9)
        (schedule,) = schedules_of(model)
        assert all(s.chunked for s in schedule.segments), str(schedule)
