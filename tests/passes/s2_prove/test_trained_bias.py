"""Trained biases: who makes them, which of their dims has the rows, and how far what reads them reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from graphs import OneLayer, facts_of, one_layer, reasons
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv

from streambp_fx.passes.graph.facts import COLUMN_AXIS, ROW_AXIS, Facts, Reach, _divided

aten = torch.ops.aten
INF = float("inf")


def distance(x: Tensor) -> Tensor:
    position = torch.arange(x.shape[1])
    return position[:, None] - position[None, :]


def looked_up(m: OneLayer, x: Tensor) -> Tensor:
    """(4, T, T): the first weights of a map, by distance."""
    return F.embedding(distance(x).clamp(0, 7), m.out.weight)[..., :4].permute(2, 0, 1)


def layer(scores: Callable[[OneLayer, Tensor, Tensor], Tensor], hidden: float | None = -INF) -> Facts:
    """Attention whose scores are made of (module, x, products), with a number in columns after the row."""

    def body(m: OneLayer, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        found = scores(m, x, q @ k.mT)
        found = found if hidden is None else found.masked_fill(distance(x) < 0, hidden)
        return (found.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return one_layer(body)


def reach(facts: Facts) -> Reach | None:
    """Of the one segment that reads along the sequence; None if it is not chunked."""
    (found,) = [s for s in facts.segments if s.mixings or not s.chunked]
    return found.reach if found.chunked else None


ADDED: dict[str, tuple[Callable[[OneLayer, Tensor, Tensor], Tensor], Reach | None]] = {
    "a table": (lambda m, x, s: s + looked_up(m, x)[: s.shape[1]], Reach.CAUSAL),
    "an index": (lambda m, x, s: s + m.out.weight[0][distance(x).clamp(0, 7)], Reach.CAUSAL),
    "a slope": (lambda m, x, s: s - m.out.weight[0, 0] * distance(x), Reach.CAUSAL),
    "a map of features": (
        lambda m, x, s: s + F.linear(distance(x)[..., None].float(), m.out.weight[:1, :1])[..., 0],
        Reach.CAUSAL,
    ),
    "scores that are mixed by heads": (
        lambda m, x, s: (s.permute(0, 2, 3, 1) @ m.out.weight[: s.shape[1], : s.shape[1]]).permute(
            0, 3, 1, 2
        ),
        Reach.CAUSAL,
    ),
    "of all columns": (lambda m, x, s: s + looked_up(m, x)[:1].softmax(-1), Reach.FULL),
    "summed from column to column": (lambda m, x, s: s + looked_up(m, x)[:1].cumsum(-1), None),
    "turned": (lambda m, x, s: s + looked_up(m, x)[:1].mT, None),
    "merged": (
        lambda m, x, s: s + m.out.weight[0][distance(x).clamp(0, 7).view(-1)].view(x.shape[1], -1),
        None,
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_how_far_rows_read(name: str) -> None:
    scores, expected = ADDED[name]
    facts = layer(scores)
    assert reach(facts) is expected, reasons(facts)


def test_the_first_of_two_dims_has_the_rows() -> None:
    facts = layer(lambda m, x, s: s + looked_up(m, x)[: s.shape[1]])
    (table,) = [n for n in facts.nodes if n.target is aten.embedding.default and n in facts.mixings]
    assert facts.layouts[table] == (ROW_AXIS, COLUMN_AXIS, None)


def test_each_reader_makes_it() -> None:
    """Both attentions read one bias; neither segment stores it."""

    def body(m: OneLayer, x: Tensor) -> Tensor:
        bias = looked_up(m, x)[:1].masked_fill(distance(x) < 0, -INF)
        for _ in range(2):
            q, k, v = m.heads(x)
            x = x + ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x

    facts = one_layer(body)
    layers = [s for s in facts.segments if s.mixings]
    assert len(layers) == 2 and all(s.chunked and len(s.rows) == 1 for s in layers)
    assert [sum(n.target is aten.embedding.default for n in s.nodes) for s in layers] == [1, 1]


@pytest.mark.parametrize("trained", [True, False])
def test_attention_is_written_out_where_its_mask_is_trained(trained: bool) -> None:
    def body(m: OneLayer, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        bias = looked_up(m, x)[:1]
        mask = (bias if trained else bias.detach()).masked_fill(distance(x) < 0, -INF)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    facts = one_layer(body)
    fused = any(n.target is aten.scaled_dot_product_attention.default for n in facts.nodes)
    assert fused is not trained
    assert reach(facts) is (Reach.CAUSAL if trained else Reach.FULL)


LOWEST: dict[str, tuple[Callable[[OneLayer, Tensor], Tensor], Reach]] = {
    "a parameter": (lambda m, x: m.out.weight[0][distance(x).clamp(0, 7)], Reach.CAUSAL),
    "a view of a parameter": (
        lambda m, x: m.out.weight.t()[0][distance(x).clamp(0, 7)],
        Reach.CAUSAL,
    ),
    "logarithms": (lambda m, x: m.out.weight[0].log()[distance(x).clamp(0, 7)], Reach.FULL),
    "a table with an end": (
        lambda m, x: F.pad(m.out.weight[0], (0, 1), value=-INF)[distance(x).clamp(0, 8)],
        Reach.FULL,
    ),
    "a factor of a mask": (
        lambda m, x: torch.zeros(distance(x).shape).masked_fill(distance(x) > 4, -INF) * m.out.weight[0, 0],
        Reach.FULL,
    ),
    "a map of a mask": (
        lambda m, x: (distance(x)[..., None].double().log().float() @ m.out.weight[:1, :1])[..., 0],
        Reach.FULL,
    ),
    "picked from rows with an end": (
        lambda m, x: F.pad(m.out(x)[:, None], (0, 1), value=-INF).gather(
            -1, distance(x).clamp(0, 8).expand(x.shape[0], 1, -1, -1)
        ),
        Reach.FULL,
    ),
    "picked from rows": (
        lambda m, x: m.out(x)[:, None].gather(-1, distance(x).clamp(0, 7).expand(x.shape[0], 1, -1, -1)),
        Reach.CAUSAL,
    ),
}


@pytest.mark.parametrize("name", LOWEST)
def test_the_lowest_number_hides_what_is_below_ordinary_numbers_alone(name: str) -> None:
    """What is made of parameters may be infinite; then a row may see nothing, and reads all."""
    bias, expected = LOWEST[name]
    assert reach(layer(lambda m, x, s: s + bias(m, x), torch.finfo(torch.float32).min)) is expected


def test_a_mask_times_a_parameter_hides_nothing() -> None:
    """The parameter may be zero, or negative."""
    lowest = torch.finfo(torch.float32).min

    def scores(m: OneLayer, x: Tensor, s: Tensor) -> Tensor:
        return s + torch.zeros(distance(x).shape).masked_fill(distance(x) < 0, lowest) * m.out.weight[0, 0]

    assert reach(layer(scores, None)) is Reach.FULL


class Returning(OneLayer):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        bias = looked_up(self, x)[:1].masked_fill(distance(x) < 0, -INF)
        for _ in range(2):
            q, k, v = self.heads(x)
            x = x + ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(x), self.body(self, bias)


def test_a_bias_that_is_returned_without_its_gradient() -> None:
    facts = facts_of(Returning(lambda m, bias: bias.detach()), torch.randint(0, 11, (2, 13)))
    layers = [s for s in facts.segments if s.mixings and s.chunked]
    assert len(layers) == 2, reasons(facts)


def test_a_bias_that_is_returned_is_not_made_anew() -> None:
    """Whoever asks for its gradient asks for what all readers give it."""
    with pytest.raises(Exception, match="a value that is returned is used as well where the graph cannot be"):
        facts_of(Returning(lambda m, bias: bias), torch.randint(0, 11, (2, 13)))


def test_sizes_are_divided_where_they_can_be() -> None:
    s, b = sympy.symbols("s b", positive=True, integer=True)
    assert _divided(FloorDiv(s**2, s)) == s and _divided(FloorDiv(b * s**2, b * s) + 1) == s + 1
    assert _divided(FloorDiv(s**2 - s, s * (s - 1))) == 1
    for kept in (FloorDiv(s + 1, 2), FloorDiv(s**2 + 3 * s, 2 * s), FloorDiv(s, s * b)):
        assert _divided(kept) == kept
