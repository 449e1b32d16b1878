"""Biases of attention that are trained: tables by distance, slopes, networks of distances, relative keys."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from e2e_check import compare, in_double
from e2e_models import perturb, sample
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import streambp_fx
from streambp_fx.passes.graph.facts import Reach

WIDTH, HEADS, VOCAB, BUCKETS = 16, 4, 31, 33  # a table as long as one of the sequences
INF = math.inf


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.table, self.keys = nn.Embedding(BUCKETS, HEADS), nn.Embedding(BUCKETS, WIDTH // HEADS)
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.inner, self.outer = nn.Linear(1, 8), nn.Linear(8, HEADS)


def distance(x: Tensor) -> Tensor:
    """(T, T), int64: how far a column lies behind a row."""
    position = torch.arange(x.shape[1])
    return position[:, None] - position[None, :]


def later(x: Tensor) -> Tensor:
    return distance(x) < 0


def buckets(m: Attention, x: Tensor) -> Tensor:
    """As T5's: exact for small distances, by their logarithm for larger ones."""
    far = distance(x).clamp(min=0)
    log = 8 + (torch.log(far.clamp(min=1) / 8) / math.log(4) * 8).long()
    return m.table(torch.where(far < 8, far, log.clamp(max=BUCKETS - 1))).permute(2, 0, 1)


def near(x: Tensor) -> Tensor:
    return distance(x).clamp(0, BUCKETS - 1)


# What is added to the scores, of shape (heads, T, T).
BIASES: dict[str, Callable[[Attention, Tensor], Tensor]] = {
    "buckets": buckets,
    "an indexed table": lambda m, x: m.table.weight.t()[:, near(x)],
    "slopes": lambda m, x: -m.slopes[:, None, None] * distance(x).abs(),
    "logarithms": lambda m, x: -m.slopes.abs()[:, None, None] * torch.log1p(distance(x).abs().double()),
    "a network": lambda m, x: m.outer(
        torch.tanh(m.inner(torch.log1p(distance(x).clamp(min=0).double())[..., None]))
    ).permute(2, 0, 1),
    "two tables": lambda m, x: torch.cat(
        [m.table(near(x))[..., :2], m.table(near(x) // 2)[..., 2:]], -1
    ).permute(2, 0, 1),
    "of unit length": lambda m, x: F.normalize(m.table(near(x)), dim=-1).permute(2, 0, 1),
    "a window": lambda m, x: torch.where(distance(x) < 9, m.table(near(x)).permute(2, 0, 1), -INF),
    "over all columns": lambda m, x: m.table(near(x)).softmax(1).permute(2, 0, 1),
}
REACHES = {"a window": Reach.WINDOW, "over all columns": Reach.FULL}


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    return ((q @ k.mT) / 2 + bias).masked_fill(hidden, -INF).softmax(-1) @ v


def lowest(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    return ((q @ k.mT) / 2 + torch.where(hidden, torch.finfo(q.dtype).min, bias)).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(hidden, -INF), scale=0.5)


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    mask = bias.masked_fill(hidden, -INF)
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=mask, enable_gqa=True)


WAYS = (added, lowest, fused, grouped)


class Model(nn.Module):
    """Two layers, each with a bias of its own, or with that of the first."""

    def __init__(self, bias: Callable[[Attention, Tensor], Tensor], way: Callable[..., Tensor], shared: bool):
        super().__init__()
        self.bias, self.way, self.shared = bias, way, shared
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        first = self.bias(self.layers[0], x) if self.shared else None
        for layer in self.layers:
            bias = self.bias(layer, x) if first is None else first
            q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + layer.out(self.way(q, k, v, bias, later(x)).transpose(1, 2).flatten(2))
            x = x + layer.down(F.gelu(layer.up(x)))
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return CausalLMOutput(loss=F.cross_entropy(logits, labels[:, 1:].flatten()))


def batches() -> dict[str, dict[str, Tensor]]:
    sizes = ((2, BUCKETS), (1, 41), (3, WIDTH), (2, 7), (2, 9))
    ids = {
        f"{b} x {t}": torch.randint(VOCAB, (b, t), generator=torch.Generator().manual_seed(t))
        for b, t in sizes
    }
    return {name: {"input_ids": v, "labels": v} for name, v in ids.items()}


EACH = (*itertools.product(BIASES, (added, fused)), *itertools.product(("buckets", "slopes"), WAYS))
CASES = [(name, way, shared) for name, way in dict.fromkeys(EACH) for shared in (False, True)]
KEPT = (("slopes", lowest, False),)


@pytest.mark.parametrize(("name", "way", "shared"), sample(CASES, *KEPT))
def test_exact_and_streamed(name: str, way: Callable[..., Tensor], shared: bool) -> None:
    """A layer is a segment of its own, which stores its input alone and reads no further than its mask."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Model(BIASES[name], way, shared).double()
    model = streambp_fx.transform(copy.deepcopy(eager), chunk=8)
    compare(eager, model, batches(), 1e-9)
    layers = [s for s in streambp_fx.schedule(model).segments if s.mixings]
    reach = REACHES.get(name, Reach.CAUSAL)
    if way is lowest and name == "slopes":
        reach = Reach.FULL  # a bias of any size may lift what the lowest number hides
    assert [(s.chunked, s.reach) for s in layers] == [(True, reach)] * 2
    assert all(len(s.saved) == 1 for s in layers), [s.saved for s in layers]


SETTINGS = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 2}
SETTINGS |= {"num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0}
DECODERS = [("T5", "sdpa"), ("T5", "eager"), ("UMT5", "sdpa")]
DECODERS += [("SwitchTransformers", "eager"), ("LongT5", "eager")]


def encoder_and_decoder(name: str, impl: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SETTINGS)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().train()
    model.set_attn_implementation(impl)
    perturb(model, 0)
    return model


@pytest.mark.parametrize(("name", "impl"), sample(DECODERS))
def test_decoders_of_transformers(name: str, impl: str) -> None:
    """The first layer makes a bias that all layers read; what the encoder gives is read by rows."""
    torch._dynamo.reset()
    given: dict[str, dict[str, Tensor]] = {}
    for batch, length, others in ((2, 33, 19), (1, 41, 8), (2, 9, 33)):
        ids, labels = torch.randint(1, 61, (batch, others)), torch.randint(1, 61, (batch, length))
        labels[0, -4:], seen = -100, torch.ones_like(ids)
        seen[0, -3:] = 0
        given[f"{batch}, {length}, {others}"] = {"input_ids": ids, "labels": labels, "attention_mask": seen}
    with in_double(functools.partial(encoder_and_decoder, name, impl)):
        eager = encoder_and_decoder(name, impl)
        model = streambp_fx.transform(copy.deepcopy(eager), chunk=8)
        compare(eager, model, given, 1e-9)
    layers = [s for s in streambp_fx.schedule(model).segments if s.mixings]
    assert [(s.chunked, s.reach) for s in layers] == [(True, Reach.CAUSAL)] * 2
