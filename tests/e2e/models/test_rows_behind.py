"""Layers whose attention nobody understands: the rows behind it run in chunks, and nothing more is stored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, grads
from e2e_memory import measure
from e2e_models import sample
from torch import Tensor, nn

import streambp_fx

WIDTH, LAYERS, VOCAB = 16, 3, 61
calls: list[int] = []


@torch.library.custom_op("streambp_tests::mixed", mutates_args=())
def mixed(x: Tensor) -> Tensor:
    """Rows of both directions; nobody can tell from outside."""
    calls.append(x.shape[1])
    return x.sin() + x.flip(1).cos() * 0.3


@mixed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return gradient * x.cos() - 0.3 * gradient.flip(1) * x.sin()


mixed.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Layer(nn.Module):
    def __init__(self, feed_forward: int, dropped: float) -> None:
        super().__init__()
        self.norm, self.own, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, feed_forward), nn.Linear(feed_forward, WIDTH)
        self.dropped = dropped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.own(self.norm(x))
        y = torch.ops.streambp_tests.mixed(F.dropout(y, self.dropped) if self.dropped else y)
        between = x + self.out(y)
        return between, between + self.down(F.gelu(self.up(self.norm2(between))))


class Model(nn.Module):
    def __init__(self, feed_forward: int = 64, dropped: float = 0.0, shows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(feed_forward, dropped) for _ in range(LAYERS))
        self.shows = shows

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x, shown = self.embedding(input_ids), []
        for layer in self.layers:
            between, x = layer(x)
            shown.append(between)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return (loss, shown[1]) if self.shows else loss


def batch(rows: int, samples: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(samples * rows).reshape(samples, rows) * 7 % VOCAB
    return {"input_ids": ids, "labels": ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)}


def streamed(model: nn.Module, door: str = "transform", **options: Any) -> Any:
    torch._dynamo.reset()
    if door == "transform":
        return streambp_fx.transform(model, chunk=8, logits="keep", **options)
    seq_dim = {"input_ids": 1, "labels": 1}
    return torch.compile(model, backend="streambp", options={"chunk": 8, "seq_dim": seq_dim, **options})


def schedule_of(model: nn.Module) -> streambp_fx.Schedule:
    found = streambp_fx.schedule(model)
    assert found is not None
    return found


def assert_cut(model: nn.Module, layers: int = LAYERS) -> None:
    """Each layer is a part that runs unchunked and one that runs in chunks, of which nothing is stored."""
    segments = schedule_of(model).segments
    behind = [s for s in segments if s.is_behind]
    assert len(behind) == layers and all(s.chunked and len(s.nodes) > 3 for s in behind)
    unchunked = {s.index for s in segments if s.refused is not None}
    assert len(unchunked) == LAYERS and unchunked >= {s.index - 1 for s in behind}


OPTIONS: list[dict[str, Any]] = [
    {}, {"every": 2}, {"save": "attention"}, {"offload": "disk"},
    {"offload": "disk", "offload_rows": True}, {"order": "chunks"},
]  # fmt: skip
CASES = [(door, options) for options in OPTIONS for door in ("transform", "compile")]


@pytest.mark.filterwarnings("ignore:.*run unchunked", "ignore:.*order=")
@pytest.mark.parametrize(("door", "options"), sample(CASES, CASES[0], CASES[7]), ids=str)
def test_exact_and_cut(door: str, options: dict[str, Any]) -> None:
    model = Model().double()
    eager = copy.deepcopy(model)
    call = streamed(model, door, **options)
    for rows, samples in ((33, 2), (40, 1), (9, 3)):
        eager.zero_grad(), model.zero_grad()
        want, got = eager(**batch(rows, samples)), call(**batch(rows, samples))
        want.backward()
        calls.clear()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert_close_grads(grads(model), grads(eager), 1e-9)
    if "offload_rows" not in options:
        assert calls == [9] * LAYERS, "once in the backward: it is recorded when it is run again"
    if door == "transform":
        assert_cut(model)
        assert schedule_of(model).check.status == "agrees"


@pytest.mark.filterwarnings("ignore:.*run unchunked")
def test_random_numbers_are_those_of_the_forward() -> None:
    """The gradient is that of the loss: by a difference along it, with the same draws."""
    model = Model(dropped=0.4).double()
    call = streamed(model)

    def loss() -> Tensor:
        torch.manual_seed(3)
        found: Tensor = call(**batch(33))
        return found

    loss().backward()
    assert not torch.equal(call(**batch(33)), loss())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    around = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.add_(g / norm, alpha=step)
        around.append(loss().detach())
    torch.testing.assert_close((around[0] - around[1]) / 2e-5, norm, rtol=1e-6, atol=0)
    assert_cut(model)


@pytest.mark.filterwarnings("ignore:.*run unchunked")
def test_what_is_returned_from_between_is_kept() -> None:
    model = Model(shows=True).double()
    eager = copy.deepcopy(model)
    call = streamed(model)
    found = []
    for each in (eager, call):
        loss, shown = each(**batch(33))
        shown.retain_grad()
        (loss + shown.square().sum()).backward()
        found.append((loss, shown, shown.grad))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert_close_grads(grads(model), grads(eager), 1e-9)
    assert_cut(model, layers=LAYERS - 1)


@pytest.mark.filterwarnings("ignore:.*run unchunked")
def test_the_peak_is_predicted_and_is_not_that_of_the_feed_forward_part() -> None:
    rows, feed_forward = 512, 64 * WIDTH
    model = Model(feed_forward)
    call = streamed(model, loss_chunk=16)
    given = batch(rows, 1)

    def step() -> None:
        call(**given).backward()

    step()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()
    peak = measure(step, [*model.parameters(), *(p.grad for p in model.parameters()), *given.values()]).peak
    cost = schedule_of(model).cost
    predicted = cost.peak(cost.sizes(rows, 8)).total
    assert peak == pytest.approx(predicted, rel=0.03)
    assert peak < rows * feed_forward * 4, "one activation of a feed-forward part"


@pytest.mark.filterwarnings("ignore:.*run unchunked")
def test_a_weight_that_is_changed_before_the_backward_is_an_error() -> None:
    model = Model()
    loss = streamed(model)(**batch(33))
    with torch.no_grad():
        model.layers[1].own.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
