"""Losses that users write: one sweep over the head where they are linear in the rows, two where not."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, check_exact, step, transform
from e2e_models import LOSS_CHUNK, VOCAB, build, plain, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx.passes.s6_schedule import step_parts
from streambp_fx.passes.step.row_chunks import split_rows
from streambp_fx.runtime.segments import segment_runner as streamed


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[:, :-1].float() if logits.dtype != torch.float64 else logits[:, :-1]
    rows = F.cross_entropy(shifted.reshape(-1, VOCAB), labels[:, 1:].reshape(-1), reduction="none")
    return rows.view(labels.shape[0], -1)


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """By log-softmax and gather, as trainers write it."""
    chosen = labels[:, 1:].clamp_min(0).unsqueeze(-1)
    return logits[:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1) * (labels[:, 1:] != -100)


ONE_SWEEP = {
    "mean": lambda x, y: token_losses(x, y).sum() / (y[:, 1:] != -100).sum(),
    "weighted": lambda x, y: (token_losses(x, y) * y[:, 1:].clamp_min(0)).sum() * 0.01,
    # not linear, but row by row: the head computes it, and what is left is a mean
    "clipped ratio": lambda x, y: (
        -torch.minimum(
            log_probabilities(x, y).exp(), (0.2 * log_probabilities(x, y)).exp().clamp(0.7, 0.9)
        ).mean()
    ),
    "gathered": lambda x, y: -log_probabilities(x, y).sum() / 100,
}
TWO_SWEEPS = {
    "preference": lambda x, y: -F.logsigmoid(log_probabilities(x, y).sum(1).diff()).mean(),
    "squared": lambda x, y: token_losses(x, y).square().mean().sqrt(),
}
OBJECTIVES = {**ONE_SWEEP, **TWO_SWEEPS}


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor | None


class WithObjective(nn.Module):
    """A causal language model whose loss is somebody's own function of logits and labels."""

    def __init__(self, family: str, objective: str) -> None:
        super().__init__()
        self.model = build(family, "sdpa" if family != "gemma2" else "eager")
        self.objective = objective

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        loss = None if labels is None else OBJECTIVES[self.objective](logits, labels)
        return Output(loss, logits)


OFTEN = ("clipped ratio",)
WAYS = [*(("llama", o) for o in OBJECTIVES), ("gemma2", "mean"), ("gemma2", "preference")]


@pytest.mark.parametrize(("family", "objective"), sample(WAYS, *(("llama", o) for o in OFTEN)))
def test_objectives_are_exact(family: str, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int | None] = []
    decide = step_parts.one_sweep
    monkeypatch.setattr(step_parts, "one_sweep", lambda *a: sweeps.append(decide(*a)) or sweeps[-1])
    check_exact(
        functools.partial(WithObjective, family, objective), {"T=67": plain(2, 67), "T=33": plain(2, 33)}
    )
    assert (sweeps[0] is not None) == (objective in ONE_SWEEP)


@pytest.mark.slow
def test_a_streamed_loss_cannot_be_differentiated_twice() -> None:
    model = transform(build("llama"))
    loss = model(**plain(2, 67)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        loss.backward()
    streambp_fx.restore(model)


def test_the_scale_of_the_loss_reaches_the_gradient() -> None:
    eager = build("llama")
    streamed = transform(copy.deepcopy(eager))
    _, want = step(eager, plain(2, 67), scale=-4.0)
    _, got = step(streamed, plain(2, 67), scale=-4.0)
    assert_close_grads(got, want, 1e-9)


@pytest.mark.parametrize("tied", sample([True, False], True))
def test_rows_without_a_part_in_the_loss_are_left_out(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and padding have ignored labels; chunks of the head that hold nothing else are not run."""
    ran: list[int] = []
    call = streamed.SegmentRunner.call

    def counted(runner: Any, kind: str, block: Any, *args: Any) -> Any:
        if kind == "loss" and block.extent.start not in ran[-1:]:
            ran.append(block.extent.start)
        return call(runner, kind, block, *args)

    monkeypatch.setattr(streamed.SegmentRunner, "call", counted)
    prompt = plain(2, 67)
    prompt["labels"] = prompt["labels"].clone()
    prompt["labels"][0, :30] = -100
    prompt["labels"][1, :21] = -100
    prompt["labels"][:, 50:] = -100
    batches = {"some": prompt, "all": plain(2, 67)}
    check_exact(functools.partial(build, "llama", tie_word_embeddings=tied), batches, check="never")
    chunks = list(split_rows(67, LOSS_CHUNK))
    with_labels = [start for start, rows in chunks if start + rows > 20 and start < 49]  # of the next token
    assert ran == [*with_labels, *(start for start, _ in chunks)] and len(with_labels) < len(chunks) - 2
