"""Operations the compiler cannot know, or that look ahead: the gradient stays exact."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import check_exact, compare, in_double, pair, transform
from e2e_memory import Work, measure
from e2e_models import HIDDEN, VOCAB, build, padded, perturb, plain, sample
from torch import nn
from torch.nn import functional as F

import streambp_fx
from streambp_fx.cost.held_bytes import CHUNK, LOSS_CHUNK, TOKENS

RTOL = 1e-9
HERE = Path(__file__)


@torch.library.custom_op("streambp_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    """Mixes rows in both directions; nobody can tell from outside."""
    return x.sin() + x.flip(1).cos().mul(0.3)


@mystery.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("streambp_tests::mystery_backward", mutates_args=())
def mystery_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return g * x.cos() - 0.3 * g.flip(1) * x.sin()


@mystery_backward.register_fake
def _(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


mystery.register_autograd(
    lambda ctx, g: torch.ops.streambp_tests.mystery_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def attend_both_ways(x: torch.Tensor) -> torch.Tensor:
    q = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=False).transpose(1, 2).reshape(x.shape)


def scores_both_ways(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.transpose(1, 2) / 6).softmax(-1) @ x


def almost_causal(x: torch.Tensor) -> torch.Tensor:
    """Causal attention but for one row: j <= i + 1."""
    i = torch.arange(x.shape[1])
    mask = i[None, :] <= i[:, None] + 1
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def filled(x: torch.Tensor, hidden: Callable[[Any, Any], torch.Tensor], value: float) -> torch.Tensor:
    """Attention by hand; scores are filled where the mask is true."""
    i = torch.arange(x.shape[1])
    scores = (x @ x.transpose(1, 2)).masked_fill(hidden(i[:, None], i[None, :]), value)
    return scores.softmax(-1) @ x


HUGE = torch.finfo(torch.float64).min


def conv(x: torch.Tensor, ahead: int) -> torch.Tensor:
    kernel = torch.linspace(-1, 1, 3 * HIDDEN, dtype=x.dtype).view(HIDDEN, 1, 3)
    padded_x = F.pad(x.transpose(1, 2), (2 - ahead, ahead))
    return F.conv1d(padded_x, kernel, groups=HIDDEN).transpose(1, 2)


MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean over the sequence": lambda x: x.mean(1, keepdim=True),
    "max over the sequence": lambda x: x.amax(1, keepdim=True) * 0.5,
    "bidirectional attention": attend_both_ways,
    "bidirectional scores": scores_both_ways,
    "a mask that looks one row ahead": almost_causal,
    "hidden by minus infinity": lambda x: filled(x, lambda i, j: j > i, -math.inf),
    "hidden by a huge number": lambda x: filled(x, lambda i, j: j > i, HUGE),
    "hidden by a huge number, a window": lambda x: filled(x, lambda i, j: (j > i) | (j <= i - 9), HUGE),
    "rows that see nothing": lambda x: filled(x, lambda i, j: (j > i) | (i < 3), HUGE),
    "all but the next are hidden": lambda x: filled(x, lambda i, j: j <= i, HUGE),
    "roll back": lambda x: x.roll(1, 1),
    "roll ahead": lambda x: x.roll(-1, 1),
    "flip": lambda x: x.flip(1),
    "softmax over the sequence": lambda x: x.softmax(1) * x.shape[1],
    "cumsum along the sequence": lambda x: x.cumsum(1) / 20,
    "cumsum from the end": lambda x: x.flip(1).cumsum(1).flip(1) / 20,
    "shift ahead by pad and slice": lambda x: F.pad(x, (0, 0, 0, 1))[:, 1:],
    "shift back by pad and slice": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "the last row for all": lambda x: x[:, -1:].expand_as(x),
    "the first row for all": lambda x: x[:, :1].expand_as(x),
    "norm over sequence and width": lambda x: F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
    "causal convolution": functools.partial(conv, ahead=0),
    "convolution that looks ahead": functools.partial(conv, ahead=1),
    "sorted rows": lambda x: x.sort(1).values,
    "a number that depends on T": lambda x: x * (x.shape[1] / 50),
    "mixing across the batch": lambda x: x.flip(0),
    "mystery op": mystery,
}


# Those that are chunked; of the others one segment runs unchunked.
CHUNKED = {name for name in MIXERS if "hidden" in name or "scores" in name or "attention" in name}
CHUNKED |= {"a mask that looks one row ahead", "rows that see nothing"}
CHUNKED |= {"a number that depends on T", "mixing across the batch", "no mixing", "causal convolution"}


def check_mixing(mixer: str, factory: Callable[[], Any], batches: dict[str, Any]) -> Any:
    """Exact; what is chunked, and what is said of the rest, is what the mixer allows."""
    unchunked = 0 if mixer in CHUNKED else 1
    with pytest.warns(streambp_fx.StreamBPWarning) if unchunked else contextlib.nullcontext():
        _, streamed = check_exact(factory, batches, unchunked=unchunked)
    return streamed


class Mixed(nn.Module):
    """An MLP and something else after it."""

    def __init__(self, inner: nn.Module, mixer: str) -> None:
        super().__init__()
        self.inner, self.mixer = inner, mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + MIXERS[self.mixer](y)


def with_mixer(mixer: str, layer: int = 0, **over: Any) -> Any:
    model = build("llama", **over)
    model.model.layers[layer].mlp = Mixed(model.model.layers[layer].mlp, mixer)
    return model


OFTEN = ("a mask that looks one row ahead",)


@pytest.mark.parametrize("mixer", sample(MIXERS, *OFTEN))
def test_mixing_is_exact(mixer: str) -> None:
    batches = {"T=67": plain(2, 67), "T=65": plain(2, 65), "T=11": plain(2, 11), "T=32": plain(2, HIDDEN)}
    check_mixing(mixer, lambda: with_mixer(mixer), batches)


@pytest.mark.parametrize("mixer", sample(["mystery op", "flip", "cumsum along the sequence"]))
def test_mixing_with_a_mask_is_exact(mixer: str) -> None:
    batches = {"left": padded(67, "left"), "right": padded(65, "right")}
    check_mixing(mixer, lambda: with_mixer(mixer, layer=1), batches)


BESIDE = ["flip", "bidirectional attention", "roll ahead", "the last row for all"]


@pytest.mark.parametrize("mixer", sample(BESIDE))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_other_layer_is_still_chunked(mixer: str) -> None:
    """One bad layer costs one layer; the schedule says which and why."""
    streamed = transform(with_mixer(mixer))
    streamed(**plain(2, 67)).loss.backward()
    schedule = streambp_fx.schedule(streamed)
    assert any(s.chunked for s in schedule.segments), str(schedule)
    for segment in schedule.segments:
        assert segment.chunked or segment.reason, str(schedule)


WIDE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 700, "num_hidden_layers": 3}


@pytest.mark.parametrize("mixer", sample(MIXERS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_predicted_peak_is_what_is_live(mixer: str) -> None:
    """Autograd holds more than liveness over a graph would say; and counting leaves the step as it was."""
    if "convolution" in mixer:
        pytest.skip("its kernel is made for one width")
    model = with_mixer(mixer, layer=1, **WIDE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    streambp_fx.transform(model, chunk=64, loss_chunk=32)
    model(**plain(2, 80)).loss.backward()
    found = streambp_fx.schedule(model)
    assert found is not None and str(found.for_length(256))
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    for tokens in (256, 517):
        batch = plain(2, tokens)
        live = measure(lambda b=batch: model(**b).loss.backward(), [*known, *batch.values()]).peak
        assert found.cost.peak(found.cost.sizes(tokens)).total == pytest.approx(live, rel=0.08), tokens
        expression = found.cost.peak_expression(2)
        bound = int(expression.subs({TOKENS: tokens, CHUNK: 64, LOSS_CHUNK: 32}))
        assert bound >= 0.97 * live, "an expression for chunks of full length"


@pytest.mark.slow
def test_work_over_all_rows_is_counted() -> None:
    """Where a row reads all rows, states are filled before the chunks and differentiated after them."""
    model = with_mixer("rows that see nothing", layer=1, impl="eager", **WIDE)
    streambp_fx.transform(model, chunk=64, loss_chunk=32)
    model(**plain(2, 80)).loss.backward()
    found = streambp_fx.schedule(model)
    assert found is not None
    with Work() as work:
        model(**plain(2, 256)).loss.backward()
    timeline = list(found.cost.timeline(found.cost.sizes(256)))
    assert {"states", "joint", "state_joint"} <= {m.program for m in timeline}
    assert sum(m.flops for m in timeline) == work.total


# -- the warning -----------------------------------------------------------------------------------------


class Mysterious(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + mystery(y)  # the unknown op


def mysterious(layers: tuple[int, ...]) -> Any:
    model = build("llama")
    for layer in layers:
        model.model.layers[layer].mlp = Mysterious(model.model.layers[layer].mlp)
    return model


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]


@pytest.mark.parametrize("layers", [*(pytest.param((k,), marks=pytest.mark.slow) for k in (0, 1)), (0, 1)])
def test_one_warning_names_op_and_line(layers: tuple[int, ...]) -> None:
    factory = functools.partial(mysterious, layers)
    with in_double(factory), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager, streamed = pair(factory)
        batches = {"T=67": plain(2, 67), "T=65": plain(2, 65), "again": plain(2, 67)}
        compare(eager, streamed, batches, RTOL, unchunked=len(layers))
    (message,) = our_warnings(caught)
    (line,) = (n for n, t in enumerate(HERE.read_text().splitlines(), 1) if t.endswith("# the unknown op"))
    assert "mystery" in message
    assert re.search(rf"{HERE.name}\D{{1,12}}{line}\b", message), message
    left = [s for s in streambp_fx.schedule(streamed).segments if not s.chunked]
    assert left and any("mystery" in s.reason for s in left), left


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "gpt2"], "llama"))
def test_no_warning_without_a_cause(family: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transform(build(family))(**plain(2, 67)).loss.backward()
    assert our_warnings(caught) == []


# -- a model that is not from transformers ---------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor | None


class Block(nn.Module):
    def __init__(self, mixer: str | None) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))
        self.mixer = mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        y = self.mlp(self.norm2(x))
        return x + y + (MIXERS[self.mixer](y) if self.mixer else 0)


class HandWritten(nn.Module):
    """A small causal LM with the call of transformers and nothing else of it."""

    def __init__(self, mixer: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(mixer), Block(None)])
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, loss = self.head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return Output(loss, logits)


def hand_written(mixer: str | None = None) -> HandWritten:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HandWritten(mixer).double().train()
    perturb(model, 1)
    return model


BY_HAND = [None, "mystery op", "flip", "bidirectional attention"]


@pytest.mark.parametrize("mixer", sample(BY_HAND, None, "bidirectional attention"))
def test_hand_written_model(mixer: str | None) -> None:
    batches = {"T=67": plain(2, 67), "T=11": plain(2, 11), "T=97": plain(2, VOCAB)}
    check_mixing(mixer or "no mixing", lambda: hand_written(mixer), batches)
