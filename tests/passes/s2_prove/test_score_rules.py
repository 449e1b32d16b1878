"""What is claimed of scores holds for what the ops compute: every transfer function, on many arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import OneLayer, one_layer, reasons
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.nn import functional as F

from streambp_fx.passes.graph.facts import Facts, Reach, Reading, tensors_of
from streambp_fx.passes.s2_prove.footprints import mask_facts
from streambp_fx.passes.s2_prove.scores import TRANSFER, Hidden, Scores

aten = torch.ops.aten
LENGTH = 13
LOW = torch.finfo(torch.float32).min
INF = float("inf")
# (scores, later: true where the column is after the row, another mask that is not causal) -> weights
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def added(h: Tensor, value: float) -> Tensor:
    return torch.zeros(h.shape).masked_fill(h, value)


def alibi(h: Tensor) -> Tensor:
    return torch.arange(h.shape[-1], dtype=torch.float32) * 0.1


# What must be streamed causally: the last value is the reach of the scores.
CAUSAL: dict[str, Weights] = {
    "masked_fill": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1),
    "safe": lambda s, h, o: aten._safe_softmax(s.masked_fill(h, -INF), -1),
    "safe, where nothing is seen": lambda s, h, o: aten._safe_softmax(
        torch.where(o, -INF, s).masked_fill(h, -INF), -1
    ),
    "masked_fill low": lambda s, h, o: s.masked_fill(h, LOW).softmax(-1),
    "masked_fill tensor": lambda s, h, o: s.masked_fill(h, torch.tensor(-INF)).softmax(-1),
    "masked_fill twice": lambda s, h, o: s.masked_fill(o, -INF).masked_fill(h, -INF).softmax(-1),
    "the other way": lambda s, h, o: s.masked_fill(h, -INF).masked_fill(o, -INF).softmax(-1),
    "infinite, then low": lambda s, h, o: s.masked_fill(h, -INF).masked_fill(o, LOW).softmax(-1),
    "where": lambda s, h, o: torch.where(h, -INF, s).softmax(-1),
    "where not": lambda s, h, o: torch.where(~h, s, -INF).softmax(-1),
    "where tensor": lambda s, h, o: torch.where(~h, s, torch.tensor(LOW)).softmax(-1),
    "added": lambda s, h, o: (s + added(h, -INF)).softmax(-1),
    "added low": lambda s, h, o: (added(h, LOW) + s).softmax(-1),
    "added with alpha": lambda s, h, o: torch.add(s, added(h, LOW), alpha=2).softmax(-1),
    "subtracted": lambda s, h, o: torch.sub(s, added(h, -INF), alpha=-0.5).softmax(-1),
    "scaled before": lambda s, h, o: (s * 0.3 / 1.7).masked_fill(h, LOW).softmax(-1),
    "scaled after": lambda s, h, o: (s.masked_fill(h, -INF) * 0.5).softmax(-1),
    "divided after": lambda s, h, o: (s.masked_fill(h, LOW) / 0.5).log_softmax(-1).exp(),
    "bias": lambda s, h, o: (s + alibi(h) + added(h, LOW)).softmax(-1),
    "bias after": lambda s, h, o: (s.masked_fill(h, LOW) + alibi(h)).softmax(-1),
    "shifted": lambda s, h, o: (s.masked_fill(h, -INF) - 3.0 + 1).softmax(-1),
    "softcap": lambda s, h, o: (5 * (s / 5).tanh()).masked_fill(h, LOW).softmax(-1),
    "cast": lambda s, h, o: s.masked_fill(h, LOW).double().softmax(-1).float(),
    "log_softmax": lambda s, h, o: s.masked_fill(h, -INF).log_softmax(-1).exp(),
    "sigmoid": lambda s, h, o: s.masked_fill(h, LOW).sigmoid(),
    "relu": lambda s, h, o: s.masked_fill(h, -INF).relu().square() / 9,
    "exp": lambda s, h, o: (s / 9).masked_fill(h, LOW).exp() * 0.1,
    "exp2": lambda s, h, o: (s / 9).masked_fill(h, LOW).exp2(),
    "zero": lambda s, h, o: s.masked_fill(h, 0.0) * 0.1,
    "factor": lambda s, h, o: s * (~h).float(),
    "bool factor": lambda s, h, o: s * ~h,
    "decay": lambda s, h, o: s * (~h) * 0.5,
    "negated zero": lambda s, h, o: -(s.masked_fill(h, -INF).softmax(-1)),
    "twice zero": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1).masked_fill(o, 0.0),
    "product": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1) * s.tanh(),
    "difference": lambda s, h, o: (
        s.masked_fill(h, -INF).softmax(-1) - (2 * s).masked_fill(h, -INF).softmax(-1)
    ),
    "dropout": lambda s, h, o: F.dropout(s.masked_fill(h, -INF).softmax(-1), 0.4),
    "functions": lambda s, h, o: F.gelu(F.silu(torch.erf(torch.sin(s.masked_fill(h, 0.0).abs())))).pow(2),
    "lowest": lambda s, h, o: s.masked_fill(h, -INF).clamp(min=LOW).softmax(-1),
    "lowest, by name": lambda s, h, o: s.masked_fill(h, -INF).clamp_min(LOW).softmax(-1),
    "sinks": lambda s, h, o: with_sinks(s.masked_fill(h, -INF)).softmax(-1)[..., :-1],
    "shifted sinks": lambda s, h, o: shifted(with_sinks(s + added(h, LOW))).softmax(-1)[..., :-1],
    "two sinks": lambda s, h, o: shifted(with_sinks(s.masked_fill(h, -INF), 2)).softmax(-1)[..., :-2],
    "normalised": lambda s, h, o: normalised(s.masked_fill(h, -INF).exp()),
    "normalised twice": lambda s, h, o: normalised(s.masked_fill(h, LOW).softmax(-1) * s.sigmoid()),
    "by its logarithm": lambda s, h, o: (
        s.masked_fill(h, -INF) - s.masked_fill(h, -INF).logsumexp(-1, keepdim=True)
    ).exp(),
    "less its largest": lambda s, h, o: shifted(s.masked_fill(h, -INF)).softmax(-1),
    "views": lambda s, h, o: s[None].masked_fill(h, -INF)[0].softmax(-1).contiguous().clone(),
}  # fmt: skip
# What gives hidden elements weight, or may: no claim, and every row reads all rows.
FULL: dict[str, Weights] = {
    "softmax twice": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1).softmax(-1),
    "mask of columns and rows": lambda s, h, o: s.mT.masked_fill(h, -INF).softmax(-2).mT,
    "mask of columns and rows, added": lambda s, h, o: (s.mT + added(h, LOW)).softmax(-2).mT,
    "softmax alone": lambda s, h, o: s.softmax(-1),
    "softmax, then mask": lambda s, h, o: s.softmax(-1).masked_fill(h, 0.0),
    "another mask": lambda s, h, o: s.masked_fill(o, -INF).softmax(-1).masked_fill(h, 0.0),
    "plus one": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1) + 0.1,
    "sigmoid of zero": lambda s, h, o: s.masked_fill(h, 0.0).sigmoid(),
    "exp of zero": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1).exp(),
    "moderate": lambda s, h, o: s.masked_fill(h, -4.0).softmax(-1),
    "alpha 0": lambda s, h, o: torch.add(s, added(h, LOW), alpha=0).softmax(-1),
    "alpha negative": lambda s, h, o: torch.add(s, added(h, LOW), alpha=-1).softmax(-1),
    "alpha tiny": lambda s, h, o: torch.add(s, added(h, LOW), alpha=1e-38).softmax(-1),
    "subtracted": lambda s, h, o: (s - added(h, LOW)).softmax(-1),
    "undone": lambda s, h, o: (s + added(h, LOW) - added(h, LOW)).softmax(-1),
    "scaled to nothing": lambda s, h, o: (s.masked_fill(h, LOW) * 1e-38).softmax(-1),
    "divided to nothing": lambda s, h, o: (s.masked_fill(h, LOW) / 1e38).softmax(-1),
    "negated": lambda s, h, o: (-s.masked_fill(h, LOW)).softmax(-1),
    "infinite, negated": lambda s, h, o: (-s.masked_fill(h, -INF)).sigmoid(),
    "infinite, times less than zero": lambda s, h, o: (s.masked_fill(h, -INF) * -0.5).sigmoid(),
    # what is visible is lower than what is hidden: the first rows then read hidden ones alone
    "lower than what is hidden": lambda s, h, o: (
        (-(s.square() * 1e3).exp()).clamp(min=LOW).masked_fill(h, LOW / 2).softmax(-1)
    ),
    "absolute": lambda s, h, o: (s.masked_fill(h, LOW).abs() * 1e-38).softmax(-1),
    "capped after": lambda s, h, o: s.masked_fill(h, LOW).tanh().softmax(-1),
    "clamped": lambda s, h, o: s.masked_fill(h, -INF).clamp(min=-3).softmax(-1),
    "filled again": lambda s, h, o: s.masked_fill(h, LOW).masked_fill(o, 1.0).softmax(-1),
    "where again": lambda s, h, o: torch.where(o, s, s.masked_fill(h, LOW)).softmax(-1),
    "nothing seen": lambda s, h, o: s.masked_fill(o, LOW).softmax(-1),
    "product of softmaxes": lambda s, h, o: s.softmax(-1) * s.softmax(-1),
    "quotient": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1) / (s.softmax(-1) + 0.1),
    "quotient of what is not known": lambda s, h, o: s.masked_fill(h, -INF).softmax(-1) / (s.cos() + 2),
    "times what is infinite": lambda s, h, o: s.masked_fill(h, 0.0) * s.masked_fill(h, -INF).exp().log(),
    "dropout before": lambda s, h, o: F.dropout(s.masked_fill(h, LOW), 0.4).softmax(-1),
    "largest of all": lambda s, h, o: (s.masked_fill(h, -INF) - s.amax(-1, keepdim=True)).softmax(-1),
    "sum of all": lambda s, h, o: s.masked_fill(h, 0.0) / (9 + s.masked_fill(h, 2.0).sum(-1, keepdim=True)),
    "mean": lambda s, h, o: (
        s.masked_fill(h, -INF).softmax(-1) / (1 + s.masked_fill(h, 0.0) ** 2).mean(-1, keepdim=True)
    ),
    "sinks, another mask": lambda s, h, o: (
        with_sinks(s.masked_fill(o, -INF)).softmax(-1)[..., :-1].masked_fill(h, 0.0)
    ),
    "sinks alone": lambda s, h, o: with_sinks(s).softmax(-1)[..., :-1],
    "sum of two masks": lambda s, h, o: s.masked_fill(h, 0.0) + s.masked_fill(o, 0.0),
    # what is hidden weighs a great deal where no softmax follows
    "low, no softmax": lambda s, h, o: s.masked_fill(h, LOW),
    "low, scaled, no softmax": lambda s, h, o: s.masked_fill(h, LOW) * 1e-30,
    "added, no softmax": lambda s, h, o: s + added(h, LOW),
    "infinite, no softmax": lambda s, h, o: s.masked_fill(h, -INF),
    "logarithms, no exp": lambda s, h, o: s.masked_fill(h, LOW).log_softmax(-1),
}  # fmt: skip


def with_sinks(s: Tensor, count: int = 1) -> Tensor:
    sinks = torch.linspace(-1, 1, s.shape[1] * count).reshape(1, -1, 1, count)
    return torch.cat([s, sinks.expand(s.shape[0], -1, s.shape[2], -1)], -1)


def shifted(s: Tensor) -> Tensor:
    return s - s.max(dim=-1, keepdim=True).values


def normalised(s: Tensor) -> Tensor:
    return s / s.sum(-1, keepdim=True)


def body(weights: Weights) -> Callable[[OneLayer, Tensor], Tensor]:
    def attend(m: OneLayer, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        i = torch.arange(x.shape[1])
        later, other = i[None] > i[:, None], (i[None] + i[:, None]) % 3 == 1
        scores = q @ k.transpose(-1, -2) * 7
        return (weights(scores, later, other) @ v).transpose(1, 2).flatten(2)

    return attend


class Recorder(Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.module, garbage_collect_values=False)

    def values(self, facts: Facts) -> dict[Node, Tensor]:
        torch.manual_seed(1)
        given = []
        for node in (n for n in facts.nodes if n.op == "placeholder"):
            value = node.meta["val"]
            if not isinstance(value, Tensor):
                given.append(LENGTH)
                continue
            shape = [LENGTH if isinstance(s, torch.SymInt) else s for s in value.shape]
            drawn = torch.randn(shape) if value.is_floating_point() else torch.randint(0, 11, shape)
            given.append(drawn.to(value.dtype))
        self.run(*given)
        return self.env


def hidden_by(parts: tuple[tuple[Node, Reading], ...], values: dict[Node, Tensor], like: Tensor) -> Tensor:
    """True where one of the parts hides."""
    found = torch.zeros_like(like, dtype=torch.bool)
    for node, reading in parts:
        value = values[node]
        if reading is Reading.HIDES:
            found = found | value
        elif reading is Reading.FACTOR:
            found = found | (value == 0)
        else:
            found = found | (~value if value.dtype == torch.bool else value <= LOW / 2)
    return found


def claims(facts: Facts) -> set[tuple[object, Hidden]]:
    """Check every claim about a graph; returns those that say something, by op."""
    scores = Scores(facts, lambda mask: mask_facts(facts, mask))
    for node in facts.nodes:
        scores.visit(node)
    values, found = Recorder(facts).values(facts), set()
    for node in facts.nodes:
        known = scores.of(node)
        if known is None:
            continue
        value = values[node]
        hidden = value[hidden_by(known.parts, values, value)]
        found.add((node.target, known.hidden))
        if known.finite:
            assert value.isfinite().all(), node.format_node()
        if known.hidden is Hidden.ZERO:
            assert (hidden == 0).all(), node.format_node()
        elif known.hidden is Hidden.INFINITE:
            assert (hidden == -INF).all(), node.format_node()
        elif known.hidden is Hidden.LOW:
            assert (hidden <= LOW / 4).all(), node.format_node()
    return found


def reach_of_scores(facts: Facts) -> Reach:
    (found,) = [m.reach for m in facts.mixings.values() if tensors_of(m.node)[0].shape[-1] != 4]
    return found


@pytest.mark.parametrize("name", CAUSAL)
def test_claims_that_hold(name: str) -> None:
    facts = one_layer(body(CAUSAL[name]), LENGTH)
    assert len(claims(facts)) > 1
    assert reach_of_scores(facts) is Reach.CAUSAL


@pytest.mark.parametrize("name", FULL)
def test_no_claim(name: str) -> None:
    facts = one_layer(body(FULL[name]), LENGTH)
    claims(facts)
    assert reach_of_scores(facts) is Reach.FULL


GATES: dict[str, tuple[Weights, Reach]] = {
    "logsumexp": (lambda s, h, o: s.masked_fill(h, -INF).logsumexp(-1), Reach.CAUSAL),
    "largest": (lambda s, h, o: s.masked_fill(h, LOW).amax(-1), Reach.CAUSAL),
    "sum": (lambda s, h, o: s.masked_fill(h, 0.0).sum(-1), Reach.CAUSAL),
    "largest of all": (lambda s, h, o: s.amax(-1), Reach.FULL),
    "sum of what is not zero": (lambda s, h, o: s.masked_fill(h, -1.0).sum(-1), Reach.FULL),
    "another mask": (lambda s, h, o: s.masked_fill(o, 0.0).sum(-1), Reach.FULL),
    "of two masks": (
        lambda s, h, o: s.masked_fill(h, -INF).amax(-1) + s.masked_fill(h | o, -INF).logsumexp(-1),
        Reach.FULL,
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_reductions_that_no_product_follows(name: str) -> None:
    gate, reach = GATES[name]

    def body(m: OneLayer, x: Tensor) -> Tensor:
        q, k, _ = m.heads(x)
        i = torch.arange(x.shape[1])
        scores = q @ k.transpose(-1, -2)
        return x * gate(scores, i[None] > i[:, None], (i[None] + i[:, None]) % 3 == 1).sum(1).unsqueeze(-1)

    facts = one_layer(body, LENGTH)
    assert [m.reach for m in facts.mixings.values()] == [reach]
    assert all(s.chunked for s in facts.segments) and max(s.reach for s in facts.segments) is reach


@pytest.mark.parametrize(
    "place", [lambda s: s.argmax(-1), lambda s: s.max(-1).indices, lambda s: s.argmin(-1)]
)
def test_which_column_is_the_largest_is_not_asked_of_a_chunk(place: Callable[[Tensor], Tensor]) -> None:
    def body(m: OneLayer, x: Tensor) -> Tensor:
        q, k, _ = m.heads(x)
        return x * place(q @ k.transpose(-1, -2)).sum(1).unsqueeze(-1)

    assert "a reduction over the sequence axis" in reasons(one_layer(body, LENGTH))[0]


@pytest.mark.slow
def test_every_transfer_function_is_tried() -> None:
    """Of each registered op, or of another that has the same function."""
    tried = set()
    for weights in (*CAUSAL.values(), *FULL.values()):
        tried |= {TRANSFER.get(n.target) for n in one_layer(body(weights), LENGTH).nodes}
    untried = {f.__name__ for op, f in TRANSFER.items() if f not in tried}
    assert untried <= {"baddbmm"}, "add a case to CAUSAL or FULL"  # see test_batched_product


@pytest.mark.parametrize(
    ("beta", "alpha", "value", "reach"),
    [
        (1, 1, -INF, Reach.CAUSAL),
        (1, 0.5, LOW, Reach.CAUSAL),
        (2, 1, LOW, Reach.CAUSAL),
        (0, 1, -INF, Reach.FULL),
        (-1, 1, LOW, Reach.FULL),
        (1e-38, 1, LOW, Reach.FULL),
    ],
)
def test_batched_product(beta: float, alpha: float, value: float, reach: Reach) -> None:
    def attend(m: OneLayer, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in m.heads(x))
        i = torch.arange(x.shape[1])
        mask = added(i[None] > i[:, None], value)[None]
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), beta=beta, alpha=alpha).softmax(-1)
        return (weights @ v).unflatten(0, (x.shape[0], 2)).transpose(1, 2).flatten(2)

    facts = one_layer(attend, LENGTH)
    claims(facts)
    assert reach_of_scores(facts) is reach
