"""Noise that is drawn by rows: routers, jitter. Forward, recompute and backward draw the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_all_chunked, assert_close_grads, grads
from e2e_models import DEVICE, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx.checking.same_random_numbers import Drawing, _Seeded

CHUNK, LENGTH, WIDTH, WORDS = 8, 37, 12, 23
OPTIONS = {"chunk": CHUNK, "loss_chunk": CHUNK}

# Of scores of four experts.
NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda y: y + torch.rand_like(y),
    "randn_like": lambda y: (y + torch.randn_like(y) * F.softplus(y)).softmax(-1),
    "randint_like": lambda y: y * torch.randint_like(y, 3),
    "randint_like from": lambda y: y * torch.randint_like(y, 1, 4),
    "jitter": lambda y: y * torch.empty_like(y).uniform_(0.9, 1.1),
    "jitter on zeros": lambda y: y * torch.zeros_like(y).uniform_(0.9, 1.1),
    "jitter on new": lambda y: y * y.new_empty(y.shape).uniform_(0.9, 1.1),
    "normal": lambda y: y + torch.zeros_like(y).normal_(0.5, 0.1),
    "exponential": lambda y: (y - torch.empty_like(y).exponential_(2.0).log()).softmax(-1),
    "cauchy": lambda y: y * torch.empty_like(y).cauchy_(0.0, 0.01).clamp(-1, 1),
    "log normal": lambda y: y * torch.empty_like(y).log_normal_(0.0, 0.1),
    "geometric": lambda y: y / torch.empty_like(y).geometric_(0.5),
    "gumbel": F.gumbel_softmax,
    "gumbel, hard": lambda y: F.gumbel_softmax(y, hard=True),
    "bernoulli": lambda y: y * torch.bernoulli(y.sigmoid()),
    "bernoulli of a number": lambda y: y * torch.empty_like(y).bernoulli_(0.7),
    "bernoulli in place": lambda y: y * torch.empty_like(y).bernoulli_(y.detach().sigmoid()),
    "another dtype": lambda y: y * torch.rand_like(y, dtype=torch.float32).to(y.dtype),
    "in other rows": lambda y: y + torch.rand_like(y.flatten(0, 1)).view(y.shape),
}
SMOOTH = ("rand_like", "randn_like", "jitter", "exponential", "gumbel", "bernoulli of a number")


class Noisy(nn.Module):
    """An attention, and two layers that weight by noisy scores."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.noise = noise
        linear = nn.Linear
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), linear(WIDTH, WORDS)
        self.q, self.kv = linear(WIDTH, WIDTH), linear(WIDTH, 2 * WIDTH)
        self.scores = nn.ModuleList(linear(WIDTH, 4) for _ in range(2))
        self.inner = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1))]
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        weights = torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=x.dtype, device=x.device)
        for scores, inner in zip(self.scores, self.inner, strict=True):
            x = x + inner(x).tanh() * (NOISE[self.noise](scores(x)) @ weights)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), x


def ids(samples: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def model_of(noise: str) -> Noisy:
    torch.manual_seed(5)
    return Noisy(noise).to(DEVICE, torch.float64)


def seeded(call: Any, given: Tensor, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return call(input_ids=given, labels=given)[0]


@pytest.mark.parametrize("noise", sample(NOISE, "jitter", "bernoulli"))
def test_exact_where_both_draw_the_same(noise: str) -> None:
    """As a self-check compares them: each op gives one number."""
    eager, model = model_of(noise), streambp_fx.transform(model_of(noise), **OPTIONS)
    lengths = (LENGTH, 4 * CHUNK + 1)
    for length in lengths:
        seeded(model, ids(2, length)).backward()
    assert_all_chunked(model, at_least=3)
    model.zero_grad(set_to_none=True)
    for length in lengths:
        with _Seeded(Drawing()):
            want, got = (seeded(m, ids(2, length)) for m in (eager, model))
            for loss in (want, got):
                loss.backward()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert_close_grads(grads(model), grads(eager), 1e-10)


@pytest.mark.parametrize("noise", sample(NOISE, "exponential"))
def test_streamed_through_torch_compile(noise: str) -> None:
    """The self-check compares: a difference would be a warning, which fails a test."""
    torch._dynamo.reset()
    model = model_of(noise)
    seeded(torch.compile(model, backend="streambp", options=dict(OPTIONS)), ids()).backward()
    assert_all_chunked(model, at_least=3)


@pytest.mark.parametrize("noise", sample(SMOOTH, "randn_like"))
def test_gradient_of_the_loss_that_was_computed(noise: str) -> None:
    """Its slope along a random direction, against central differences with the same seed."""
    model = streambp_fx.transform(model_of(noise), **OPTIONS)
    given = ids()
    loss = seeded(model, given)
    torch.manual_seed(77)  # what is drawn meanwhile changes nothing
    loss.backward()
    parameters = list(model.parameters())
    numbers = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=numbers, dtype=p.dtype).to(DEVICE) for p in parameters]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, direction, strict=True))
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=step)
        losses.append(float(seeded(model, given).detach()))
    assert abs(slope) > 1e-3
    assert abs((losses[0] - losses[1]) / 2e-6 - slope) <= 1e-6 * abs(slope)
    assert abs(float(seeded(model, given, 2).detach()) - losses[1]) > 1e-6, "nothing was drawn"


class Shown(nn.Module):
    """Shows what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, embeds: Tensor) -> tuple[Tensor, ...]:
        x, shown = embeds, []
        for layer in self.layers:
            x = layer(x)
            noise = torch.rand_like(x), torch.randn_like(x), torch.empty_like(x).exponential_(2.0)
            shown += [0 * x + n for n in noise]
        return x.square().mean(), *shown


def test_what_is_drawn_has_its_distribution_and_no_two_chunks_draw_the_same() -> None:
    model = streambp_fx.transform(Shown().to(DEVICE, torch.float64), seq_dim={"embeds": 1}, **OPTIONS)
    torch.manual_seed(0)
    embeds = torch.randn(2, 40 * CHUNK, WIDTH, dtype=torch.float64, device=DEVICE)
    loss, *shown = model(embeds)
    loss.backward()
    assert_all_chunked(model)
    count = shown[0].numel()
    for place, (mean, deviation) in enumerate([(0.5, 12**-0.5), (0.0, 1.0), (0.5, 0.5)] * 2):
        drawn = shown[place].detach()
        assert abs(float(drawn.mean()) - mean) < 5 * deviation / count**0.5
        assert abs(float(drawn.std()) / deviation - 1) < 0.05
    uniform = torch.cat([shown[0].detach(), shown[3].detach()], 1)
    assert uniform.unique().numel() == uniform.numel()


def test_a_generator_of_the_model_is_left_alone() -> None:
    """It moves on as in eager: what it draws is not drawn by chunks."""

    class Own(Noisy):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            x = x * torch.empty_like(x).uniform_(0.9, 1.1, generator=self.numbers)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), x

    model = Own("jitter").to(torch.float64)
    model.numbers = torch.Generator().manual_seed(1)
    eager = copy.deepcopy(model)
    eager.numbers = torch.Generator().manual_seed(1)
    given = ids().cpu()
    with pytest.warns(streambp_fx.StreamBPWarning):
        streambp_fx.transform(model, **OPTIONS)
        got = seeded(model, given)
    torch.testing.assert_close(got, seeded(eager, given), rtol=1e-12, atol=0)
    assert model.numbers.get_state().equal(eager.numbers.get_state())


@pytest.mark.parametrize("dtype", sample([torch.bfloat16, torch.float16, torch.float32], torch.bfloat16))
def test_small_probabilities_in_half_precision(dtype: torch.dtype) -> None:
    """Numbers between 0 and 1 of half precision are 0 once in some hundreds."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, embeds: Tensor) -> tuple[Tensor, Tensor]:
            x = self.inner(embeds)
            drawn = torch.bernoulli(torch.full_like(x, 1e-4)) + torch.zeros_like(x).bernoulli_(x * 0 + 1e-4)
            return x.float().square().mean(), drawn + 0 * x

    model = streambp_fx.transform(Rare().to(DEVICE, dtype), chunk=512, seq_dim={"embeds": 1}, check="never")
    torch.manual_seed(0)
    _, drawn = model(torch.randn(2, 8192, WIDTH, device=DEVICE, dtype=dtype))
    assert_all_chunked(model, at_least=1)
    ones = float(drawn.float().sum())
    assert abs(ones - 2e-4 * drawn.numel()) < 5 * (2e-4 * drawn.numel()) ** 0.5, ones
