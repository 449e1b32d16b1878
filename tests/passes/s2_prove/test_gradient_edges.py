"""Which parameters a gradient comes to, against those that eager leaves None."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import WIDTH, OneLayer, facts_of, one_layer
from torch import Tensor

from streambp_fx.passes.graph.facts import shape_of, tensors_of
from streambp_fx.passes.s2_prove.gradient_edges import reached

Body = Callable[[OneLayer, Tensor], Tensor]


class Half(torch.autograd.Function):
    """Its second operand gets no gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, y: Tensor) -> Tensor:
        return x * 0.5 + y

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, None]:
        return g * 0.5, None


def by_place(m: OneLayer, x: Tensor) -> Tensor:
    """Values of `topk` have a gradient, places have none."""
    values, places = m.value(x).topk(2)
    return (
        x
        + values.sum(-1, keepdim=True)
        + m.key(x).gather(-1, m.query(x).argsort()[..., :WIDTH]) * places[..., :1]
    )


BODIES: dict[str, Body] = {
    "shape": lambda m, x: x.view_as(m.value(x)) + x.expand_as(m.key(x)),
    "dtype": lambda m, x: x.type_as(m.value(x)) + x.to(m.key(x)),
    "zeros": lambda m, x: x + torch.zeros_like(m.value(x)) + torch.ones_like(m.key(x)),
    "sign": lambda m, x: x + m.value(x).sign() + m.key(x).round() + (m.query(x) > 0).to(x.dtype),
    "detached": lambda m, x: x + m.value(x).detach() + m.key(x.detach()),
    "places": by_place,
    "a custom function": lambda m, x: Half.apply(m.value(x), m.key(x)),
    "both operands": lambda m, x: torch.lerp(m.value(x), m.key(x), m.query(x).sigmoid()),
    "a condition": lambda m, x: torch.where(m.value(x) > m.key(x), m.query(x), x),
}


@pytest.mark.parametrize("name", BODIES)
def test_gradients_come_where_eager_has_one(name: str) -> None:
    facts = one_layer(BODIES[name])
    model = OneLayer(BODIES[name])
    model(torch.randint(0, 11, (2, 13))).sum().backward()
    eager = {n for n, p in model.named_parameters() if p.grad is not None}
    known = {_path(facts.parameters[n]) for n in facts.parameters if n in facts.needs_grad}
    assert known == eager


def _path(name: str) -> str:
    return next(n for n, _ in OneLayer(BODIES["shape"]).named_parameters() if name.endswith(n))


def test_from_one_of_two_outputs() -> None:
    """What comes from one output alone is not reached from the other."""

    class Two(OneLayer):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.embed(ids)
            return self.value(x), self.key(x).tanh() + self.query(x)

    torch.manual_seed(0)
    facts = facts_of(Two(lambda m, x: x), torch.randint(0, 11, (2, 13)))
    for output, names in zip(facts.outputs, (("value",), ("key", "query")), strict=True):
        found = {_path(facts.parameters[n]) for n in reached(facts, [output]) if n in facts.parameters}
        assert found == {"embed.weight", *(f"{n}.{k}" for n in names for k in ("weight", "bias"))}


def test_asking_makes_no_size_a_constant() -> None:
    """`pad` knows no symbolic sizes: what it is run on must not be the values of the graph."""

    def padded(m: OneLayer, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        scores = F.pad(
            (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9), (1, 0)
        )
        return (scores.softmax(-1)[..., 1:] @ v).transpose(1, 2).flatten(2)

    facts = one_layer(padded)
    inputs = [n for n in facts.nodes if n.op == "placeholder" and tensors_of(n)]
    assert any(facts.sequence in s.free_symbols for n in inputs for s in shape_of(n))
