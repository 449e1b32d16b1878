"""Weights that a forward keeps in bounds before it reads them: changed once a step, and streamed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_adversary import DOORS
from e2e_check import assert_all_chunked, assert_close_grads, grads
from e2e_models import DEVICE, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx.passes.s5_lower import programs

CHUNK, WIDTH, WORDS = 8, 12, 23
OPTIONS = {"chunk": CHUNK, "loss_chunk": CHUNK}


class Bounded(nn.Linear):
    """Changes its weight, and then is a linear layer."""

    def __init__(self, change: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return CHANGES[self.change](self, x)


def no_grad(change: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(layer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            change(layer.weight)
        return F.linear(x, layer.weight, layer.bias)

    return forward


def data(change: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(layer: Any, x: Tensor) -> Tensor:
        change(layer.weight.data)
        return F.linear(x, layer.weight, layer.bias)

    return forward


def halve(weight: Tensor) -> None:
    weight *= 0.5


def both_halves(weight: Tensor) -> None:
    weight[:3].mul_(0.5)
    weight[3:].clamp_(-0.1, 0.1)


# Not the same twice, so that a change that is done twice, or not at all, is seen.
CHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "clamp": data(lambda w: w.clamp_(-0.1, 0.1)),
    "shrink": data(lambda w: w.mul_(0.9)),
    "an operator": data(halve),
    "a norm": data(lambda w: w.div_(w.norm(dim=0, keepdim=True))),
    "a copy": data(lambda w: w.copy_(F.normalize(w) * 1.1)),
    "parts": data(both_halves),
    "an entry": data(lambda w: w.__setitem__((0, slice(None)), 0.25)),
    "detached": lambda layer, x: F.linear(x, (layer.weight.detach().mul_(0.9), layer.weight)[1], layer.bias),
    "no_grad": no_grad(lambda w: w.mul_(0.9)),
    "no_grad, a norm": no_grad(lambda w: w.div_(w.norm())),
    "twice": data(lambda w: (w.mul_(0.9), w.add_(0.01))),
}


def read_before(layer: Any, x: Tensor) -> Tensor:
    y = F.linear(x, layer.weight)
    layer.weight.data.mul_(0.9)
    return y + F.linear(x, layer.weight, layer.bias)


def read_after_as_a_constant(layer: Any, x: Tensor) -> Tensor:
    norm = layer.weight.data.norm()
    layer.weight.data.mul_(0.9)
    return F.linear(x, layer.weight, layer.bias) * norm


def by_a_value_of_the_rows(layer: Any, x: Tensor) -> Tensor:
    layer.weight.data.mul_(x.detach().mean().tanh() * 0.01 + 1)
    return F.linear(x, layer.weight, layer.bias)


def by_random_numbers(layer: Any, x: Tensor) -> Tensor:
    layer.weight.data.add_(torch.randn_like(layer.weight.data), alpha=0.01)
    return F.linear(x, layer.weight, layer.bias)


OTHERS = {f.__name__: f for f in (read_before, read_after_as_a_constant, by_a_value_of_the_rows)}
OTHERS["by_random_numbers"] = by_random_numbers
CHANGES.update(OTHERS)


class Model(nn.Module):
    def __init__(self, change: str, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.layers = nn.ModuleList(Bounded(change) for _ in range(2))
        if tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def pair(change: str, tied: bool = False) -> tuple[Model, Model]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    eager = Model(change, tied).to(DEVICE, torch.float64)
    return eager, copy.deepcopy(eager)


def through(model: Any, door: str, **options: Any) -> Any:
    given = {**OPTIONS, **options}
    if door == "compile":
        return torch.compile(model, backend="streambp", options=given)
    return streambp_fx.transform(model, **given)


def compare(eager: Any, model: Any, call: Any, lengths: tuple[int, ...] = (37, 33, 37)) -> None:
    for length in lengths:
        numbers = torch.Generator().manual_seed(length)
        ids = torch.randint(0, WORDS, (2, length), generator=numbers).to(DEVICE)
        losses = []
        for m, run in ((eager, eager), (model, call)):
            m.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            losses.append(run(input_ids=ids))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        assert_close_grads(grads(model), grads(eager), 1e-10)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-14, atol=0, msg=name)


@pytest.mark.parametrize("change", sample([c for c in CHANGES if c not in OTHERS], "shrink", "no_grad"))
@pytest.mark.parametrize("door", sample(DOORS, "compile"))
def test_streamed(change: str, door: str) -> None:
    eager, model = pair(change)
    compare(eager, model, through(model, door))
    assert_all_chunked(model, at_least=2)


@pytest.mark.parametrize("change", sample(OTHERS, "read_before"))
@pytest.mark.parametrize("tied", sample([False, True], False))
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_other_changes_are_exact(change: str, tied: bool) -> None:
    eager, model = pair(change, tied)
    compare(eager, model, through(model, "transform", check="never"))


@pytest.mark.parametrize("change", sample(["shrink", "a norm", "an entry"], "shrink"))
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_a_weight_that_two_layers_change(change: str) -> None:
    """The first has read it when the second changes it."""
    eager, model = pair(change, tied=True)
    compare(eager, model, through(model, "transform", check="never"))


@pytest.mark.parametrize("door", DOORS)
def test_changed_once_where_the_self_check_fails(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that was not streamed in the end finds the weights changed."""
    eager, model = pair("shrink")
    usual = programs.traced_program

    def faulty(*given: Any) -> Any:
        traced = usual(*given)
        for node in traced.module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sin.default
        traced.module.recompile()
        return traced

    monkeypatch.setattr(programs, "traced_program", faulty)
    with pytest.warns(streambp_fx.StreamBPWarning, match="the self-check found"):
        compare(eager, model, through(model, door))
