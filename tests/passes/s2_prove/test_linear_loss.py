"""One sweep where the epilogue is linear in the rows, two where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import OneLayer, facts_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.graph.facts import Kind
from streambp_fx.passes.s2_prove.linear_loss import is_homogeneous, is_linear


def log_probabilities(model: OneLayer, ids: Tensor) -> Tensor:
    logits = model(ids).float()
    return -F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


LINEAR = {
    "mean": lambda rows, ids: -rows.mean(),
    "masked mean": lambda rows, ids: -(rows * (ids > 3)).sum() / (ids > 3).sum(),
    "row by row, whatever it is": lambda rows, ids: (rows.square() - rows.exp() * rows).mean(),
    "weights and shift": lambda rows, ids: ((1 - rows) * ids.float())[:, 1:].sum() * 0.3,
}
NOT_LINEAR = {
    "square of a sum": lambda rows, ids: rows.sum(1).square().mean(),
    "sigmoid of a difference": lambda rows, ids: -F.logsigmoid(rows[0].sum() - rows[1].sum()),
    "quotient": lambda rows, ids: rows.sum() / (1 + rows.sum().abs()),
    "product of sums": lambda rows, ids: rows[0].sum() * rows[1].sum(),
}


@pytest.mark.parametrize("name, expected", [*((n, True) for n in LINEAR), *((n, False) for n in NOT_LINEAR)])
def test_linearity(name: str, expected: bool) -> None:
    torch.manual_seed(0)
    model = OneLayer(lambda m, x: x)
    objective = {**LINEAR, **NOT_LINEAR}[name]
    facts = facts_of(lambda ids: objective(log_probabilities(model, ids), ids), torch.randint(0, 11, (2, 13)))
    (target,) = next(n for n in facts.nodes if n.op == "output").args[0]
    assert facts.kinds[target] is Kind.REDUCED
    assert is_linear(facts, facts.segments[-1].outputs, target) is expected


@pytest.mark.parametrize(
    "objective, expected",
    [
        (lambda rows, ids: rows.to(torch.int64).double().mean() + rows.mean(), False),
        (lambda rows, ids: (ids.double() / rows).mean(), False),
        (lambda rows, ids: (rows / rows.sum()).mean(), False),
        (lambda rows, ids: (rows * rows).mean(), False),
        (lambda rows, ids: (rows * rows.detach()).mean(), False),
        (lambda rows, ids: rows[rows > 1].mean(), False),
        (lambda rows, ids: (rows / ids.double().sum()).float().mean(), True),
        (lambda rows, ids: torch.stack([rows[0], rows[1] * 2]).flatten()[3:].sum(), True),
    ],
)
def test_steps(objective: Any, expected: bool) -> None:
    torch.manual_seed(0)
    model = OneLayer(lambda m, x: x).double()

    def both(ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = log_probabilities(model, ids).double()
        return rows, objective(rows, ids)

    facts = facts_of(both, torch.randint(0, 11, (2, 13)))
    rows, target = next(n for n in facts.nodes if n.op == "output").args[0]
    assert is_linear(facts, [rows], target) is expected


# Backwards of custom autograd functions, of a gradient and what was saved (4, 6).
HOMOGENEOUS = {
    "scaled": lambda g, x: g * 0.5 - g / 3,
    "of a norm": lambda g, x: x * g - x * x.rsqrt() * (x * g).mean(-1, keepdim=True),
    "rotated": lambda g, x: torch.cat((g.chunk(2, -1)[1], -g.chunk(2, -1)[0]), -1) * x.sin(),
    "halves": lambda g, x: torch.stack(g.split(3, -1), -1).flatten(1),
    "by a matrix": lambda g, x: F.linear(g, x),
    "a product": lambda g, x: g @ x.mT,
    "where": lambda g, x: torch.where(x > 0, g, g * 2),
    "filled": lambda g, x: g.masked_fill(x > 0, 0.0),
    "cast": lambda g, x: g.float().double().triu().flip(0),
}
NOT_HOMOGENEOUS = {
    "a penalty": lambda g, x: g + x,
    "nothing of it": lambda g, x: x * 2,
    "clipped": lambda g, x: g.clamp(-1, 1),
    "divided by its norm": lambda g, x: g / g.norm(),
    "its square": lambda g, x: g * g,
    "its sign": lambda g, x: torch.where(g > 0, x, -x),
    "a bias": lambda g, x: F.linear(g, x, x[:, 0]),
    "filled with one": lambda g, x: g.masked_fill(x > 0, 1.0),
    "chosen by itself": lambda g, x: torch.where(g > 0, g, g * 2),
    "products of both": lambda g, x: g @ g.mT,
    "a one beside it": lambda g, x: torch.cat((g, x)),
    "rounded": lambda g, x: g.to(torch.int64).double(),
}


@pytest.mark.parametrize(
    "name, expected", [*((n, True) for n in HOMOGENEOUS), *((n, False) for n in NOT_HOMOGENEOUS)]
)
def test_what_is_proved_of_a_backward(name: str, expected: bool) -> None:
    backward = {**HOMOGENEOUS, **NOT_HOMOGENEOUS}[name]
    given = (torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64) + 0.5)
    graph = make_fx(backward, tracing_mode="fake", pre_dispatch=True)(*given).graph
    gradient = next(iter(graph.nodes))
    assert is_homogeneous(graph.nodes, [gradient], graph.output_node().args[0]) is expected
    if expected:
        torch.testing.assert_close(backward(given[0] * 3, given[1]), 3 * backward(*given))
        assert not backward(given[0] * 0, given[1]).any()
