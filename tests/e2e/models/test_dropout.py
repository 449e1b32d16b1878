"""Dropout: forward, recompute and backward see the same masks, and the masks are random."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, assert_close_grads, grads, in_double, step, transform
from e2e_models import CHUNK, DEVICE, HIDDEN, build, padded, plain, sample
from torch.nn import functional as F

import streambp_fx

BATCH = plain(2, 67)

# What drops where: attention probabilities, residuals and embeddings.
CASES = {
    "llama sdpa": ("llama", "sdpa", {"attention_dropout": 0.1}),
    "llama eager": ("llama", "eager", {"attention_dropout": 0.1}),
    "gpt2": ("gpt2", "eager", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "gpt2 residual only": ("gpt2", "sdpa", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "opt": ("opt", "sdpa", {"dropout": 0.1}),
}


def build_with(case: str) -> Any:
    family, impl, over = CASES[case]
    return build(family, impl, **over)


def generator_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if DEVICE.type == "cuda" else torch.get_rng_state()


def seeded(model: Any, seed: int, batch: Any = BATCH) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(seed)
    return step(model, batch)


@pytest.mark.parametrize("case", sample(CASES))
def test_same_seed_same_step(case: str) -> None:
    with in_double(functools.partial(build_with, case)):
        streamed = transform(build_with(case))
        loss, got = seeded(streamed, 1)
        other, _ = seeded(streamed, 2)
        again, got_again = seeded(streamed, 1)
        assert again.equal(loss)
        for name, g in got.items():
            assert got_again[name].equal(g), name
        assert abs(other - loss) > 1e-6
        assert abs(build(*CASES[case][:2])(**BATCH).loss - loss) > 1e-6, "nothing was dropped"


def train_loss(model: Any, seed: int, batch: Any) -> float:
    """The streamed loss under a seed; with gradients enabled, as without them the original would run."""
    torch.manual_seed(seed)
    return float(model(**batch).loss.detach())


@pytest.mark.parametrize("case", sample(CASES, "llama sdpa"))
@pytest.mark.parametrize("masked", sample([False, True], True))
def test_gradient_of_the_loss_that_was_computed(case: str, masked: bool) -> None:
    """Analytic slope along a random direction against central differences under the same seed."""
    batch = padded(67, "right") if masked else BATCH
    with in_double(functools.partial(build_with, case)):
        streamed = transform(build_with(case))
        _, got = seeded(streamed, 3, batch)
        gen = torch.Generator().manual_seed(0)
        params = list(streamed.parameters())
        direction = [torch.randn(p.shape, generator=gen, dtype=p.dtype).to(DEVICE) for p in params]
        slope = sum(float((g * d).sum()) for g, d in zip(got.values(), direction, strict=True))
        h = 1e-6
        with torch.no_grad():
            torch._foreach_add_(params, direction, alpha=h)
        up = train_loss(streamed, 3, batch)
        with torch.no_grad():
            torch._foreach_add_(params, direction, alpha=-2 * h)
        down = train_loss(streamed, 3, batch)
    assert abs(slope) > 1e-3
    # differences of second order: h^2, and 1e-16/h of rounding
    assert abs((up - down) / (2 * h) - slope) <= 1e-6 * abs(slope)


@pytest.mark.slow
def test_another_seed_between_forward_and_backward() -> None:
    """What the user draws after the forward pass does not change the masks of the backward pass."""
    factory = functools.partial(build_with, "gpt2")
    with in_double(factory):
        streamed = transform(factory())
        _, want = seeded(streamed, 3)
        streamed.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = streamed(**BATCH).loss
        torch.manual_seed(77)
        torch.rand(1000, device=DEVICE)
        state = generator_state()
        loss.backward()
        assert generator_state().equal(state), "backward moved the user's generator"
        for name, g in grads(streamed).items():
            assert want[name].equal(g), name


@pytest.mark.slow
def test_forward_moves_the_generator() -> None:
    """Two steps in a row draw different masks, as in eager."""
    factory = functools.partial(build_with, "opt")
    with in_double(factory):
        streamed = transform(factory())
        torch.manual_seed(0)
        first, second = (streamed(**BATCH).loss.item() for _ in range(2))
    assert abs(first - second) > 1e-6


@pytest.mark.slow
def test_masks_are_of_the_right_rate_and_independent() -> None:
    """Dropout of the embeddings zeroes the gradient of inputs_embeds where an entry was dropped.

    So the mask can be read off: half of it is zero, and no two chunks have the same one.
    """
    model = transform(build("gpt2", "sdpa", embd_pdrop=0.5))
    embeds = torch.randn(2, 4 * CHUNK, HIDDEN, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.manual_seed(0)
    model(inputs_embeds=embeds, labels=plain(2, 4 * CHUNK)["labels"]).loss.backward()
    kept = embeds.grad != 0
    n = kept.numel()
    assert abs(float(kept.double().mean()) - 0.5) < 5 * 0.5 / n**0.5
    chunks = list(kept.split(CHUNK, 1))
    for a in range(4):
        for b in range(a):
            agree = float((chunks[a] == chunks[b]).double().mean())
            assert abs(agree - 0.5) < 5 * 0.5 / chunks[a].numel() ** 0.5, (a, b, agree)


class Dropped(torch.nn.Module):
    """Equal layers that drop, and show what they drop."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        linear = functools.partial(torch.nn.Linear, HIDDEN, HIDDEN, dtype=torch.float64, device=DEVICE)
        self.layers = torch.nn.ModuleList(linear() for _ in range(3))
        self.head, self.heads = linear(), heads

    def forward(self, embeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, shown = embeds, []
        for layer in self.layers:
            if self.heads:  # of the weights of attention each row has one that is not zero
                q = layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                row = torch.arange(x.shape[1], device=x.device)
                here = row[:, None] == row
                kept = F.scaled_dot_product_attention(q, q, torch.ones_like(q), attn_mask=here, dropout_p=0.5)
                kept = kept.transpose(1, 2).flatten(2)
            else:
                kept = F.dropout(torch.ones_like(x), 0.5)
            shown.append(kept.detach())
            x = x + layer(x) * kept
        return self.head(x).square().mean(), *shown


@pytest.mark.parametrize("order", sample(["layers", "chunks"], "layers"))
@pytest.mark.parametrize("heads", sample([0, 4], 4))
@pytest.mark.filterwarnings("ignore:order=.chunks. changes nothing here")
def test_equal_layers_do_not_drop_the_same(heads: int, order: str) -> None:
    """A chunk, a layer and a step have masks of their own, on every device."""
    model = transform(Dropped(heads), logits="keep", order=order, seq_dim={"embeds": 1})
    embeds = torch.randn(2, 4 * CHUNK, HIDDEN, dtype=torch.float64, device=DEVICE)
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss, *shown = model(embeds)
        loss.backward()
        kept = [layer.unflatten(-1, (heads or HIDDEN, -1))[..., 0] != 0 for layer in shown]
        masks += [chunk for layer in kept for chunk in layer.split(CHUNK, 1)]
    count = masks[0].numel()
    for a, one in enumerate(masks):
        for b, other in enumerate(masks[:a]):
            agree = float((one == other).double().mean())
            assert abs(agree - 0.5) < 5 * 0.5 / count**0.5, (a, b, agree)


class DropsRows(torch.nn.Module):
    """In place of an MLP: a constant, or dropped, so that the mask shows in its gradient."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64, device=DEVICE))
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones_like(x) * self.scale, self.p, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.25, 0.5])
def test_rate_inside_a_layer(p: float) -> None:
    """The gradient of `scale` counts what was kept: compare its mean over seeds with no dropout."""
    model = build("llama").requires_grad_(False)
    model.model.layers[1].mlp = DropsRows(p)
    reference = build("llama").requires_grad_(False)
    reference.model.layers[1].mlp = DropsRows(0.0)
    for m in (model, reference):  # logits linear in what the layer adds: no norm behind it
        m.model.norm = torch.nn.Identity()
    streamed = transform(model)
    ids = plain(2, 67)["input_ids"]

    def objective(m: Any) -> torch.Tensor:
        m.zero_grad(set_to_none=True)
        m(input_ids=ids).logits.sum().backward()
        return m.model.layers[1].mlp.scale.grad.clone()

    want = objective(reference)
    torch.manual_seed(0)
    samples = torch.stack([objective(streamed) for _ in range(8)])
    # kept with probability 1-p and divided by it: relative variance p / (1-p) / rows
    sigma = (p / (1 - p) / (2 * 67 * 8)) ** 0.5 * want.abs()
    assert ((samples.mean(0) - want).abs() <= 5 * sigma).all()
    assert (samples.std(0) > 0).all()


@pytest.mark.parametrize("case", sample(CASES, "gpt2"))
def test_dropout_is_streamed(case: str) -> None:
    """None of the above was passed by falling back to the original forward."""
    streamed = transform(build_with(case))
    out = streamed(**BATCH)
    out.loss.backward()
    assert out.logits is None
    assert_all_chunked(streamed)


@pytest.mark.parametrize("draw", [lambda w: F.dropout(w, 0.5), lambda w: w + torch.randn_like(w)])
def test_random_weights_run_unstreamed(draw: Any) -> None:
    """A weight is the same in all rows of a step; chunks would draw it anew."""

    class Random(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, draw(self.weight))

    eager, model = build("llama"), build("llama")
    for m in (eager, model):
        m.model.layers[1].mlp = Random(HIDDEN, HIDDEN, dtype=torch.float64, device=DEVICE)
        m.model.layers[1].mlp.load_state_dict(eager.model.layers[1].mlp.state_dict(), strict=False)
    streamed = transform(model)
    with pytest.warns(streambp_fx.StreamBPWarning, match="random numbers are drawn for a value"):
        loss, got = seeded(streamed, 3)
    want_loss, want = seeded(eager, 3)
    assert loss.equal(want_loss)
    assert_close_grads(got, want, 1e-6)


@pytest.mark.slow
def test_dropout_of_a_weight_in_evaluation_is_streamed() -> None:
    class Evaluated(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, F.dropout(self.weight, 0.5, training=False))

    model = build("llama")
    model.model.layers[1].mlp = Evaluated(HIDDEN, HIDDEN, dtype=torch.float64, device=DEVICE)
    streamed = transform(model)
    streamed(**BATCH).loss.backward()
    assert_all_chunked(streamed)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "compile"))
def test_attention_of_pytorch_that_drops_weights(door: str) -> None:
    """`nn.MultiheadAttention` hands its rate on to a function that a self-check does not see into."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
            self.attention = torch.nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
            return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())

    torch._dynamo.reset()
    ids = torch.arange(3 * 33, device=DEVICE).view(3, 33) * 7 % 50
    model = Model().double().to(DEVICE)
    if door == "transform":
        call = streambp_fx.transform(model, chunk=CHUNK)
    else:
        call = torch.compile(model, backend="streambp", options={"chunk": CHUNK, "seq_dim": {"input_ids": 1}})

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return call(input_ids=ids)

    loss(3).backward()
    assert_all_chunked(model, 1)
    assert loss(3) != loss(4)
    slope = float(sum(p.grad.square().sum() for p in model.parameters()))
    losses = []
    for share in (1e-5, -2e-5):
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=share)
        losses.append(float(loss(3).detach()))
    assert abs((losses[0] - losses[1]) / 2e-5 - slope) <= 1e-6 * slope
