"""The rules of one op, `aten.expand`: what `docs/writing_an_op_rule.md` goes through."""

from __future__ import annotations

import copy

import pytest
import torch
from graphs import OneLayer, one_layer, reasons
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import streambp_fx
from streambp_fx.passes.graph.facts import ROW_AXIS
from streambp_fx.passes.masks import analysis

aten = torch.ops.aten


def per_head(model: OneLayer, x: Tensor) -> Tensor:
    """Two heads that share one projection, each row for itself."""
    shared = model.query(x)[:, None].expand(-1, 2, -1, -1)
    return shared.sigmoid().sum(1) * x


def along_the_sequence(model: OneLayer, x: Tensor) -> Tensor:
    """Every row gets the same parameter."""
    return x * model.query.bias.expand(x.shape[0], x.shape[1], -1)


def rows_along_the_sequence(model: OneLayer, x: Tensor) -> Tensor:
    """Every row gets a number of each row."""
    return x * model.query(x)[:, :, 0].unsqueeze(1).expand(-1, x.shape[1], -1).sum(-1, keepdim=True)


def attention(model: OneLayer, x: Tensor) -> Tensor:
    mixed = torch.nn.functional.scaled_dot_product_attention(*model.heads(x), is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def test_rows_stay_rows() -> None:
    facts = one_layer(per_head)
    (node,) = (n for n in facts.nodes if n.target is aten.expand.default)
    assert facts.layouts[node] == (None, None, ROW_AXIS, None)
    assert not reasons(facts)


def test_a_parameter_is_the_same_in_all_rows() -> None:
    facts = one_layer(along_the_sequence)
    (node,) = (n for n in facts.nodes if n.target is aten.expand.default)
    assert facts.layouts[node] == (None, ROW_AXIS, None)
    assert not reasons(facts)


def test_repeated_along_the_sequence() -> None:
    facts = one_layer(rows_along_the_sequence)
    (node,) = (n for n in facts.nodes if n.target is aten.expand.default)
    assert facts.refusals[node] == "a value is repeated along the sequence axis"
    assert reasons(facts)


def test_an_expanded_mask_is_causal() -> None:
    def mask(ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1])
        return (position[None, None, None, :] <= position[None, None, :, None]).expand(2, 1, -1, -1)

    graph = make_fx(mask, pre_dispatch=True, tracing_mode="symbolic")(torch.ones(2, 9)).graph
    ids = next(n for n in graph.nodes if n.op == "placeholder")
    node = next(n for n in graph.nodes if n.op == "output").args[0]
    assert node.target is aten.expand.default
    known = analysis.analyze(node, ids.meta["val"].shape[1].node.expr, lambda n: n is ids)
    assert known.causal and known.plain, known.reason


@pytest.mark.parametrize("length", [8, 11])
def test_gradients(length: int) -> None:
    """The hidden size is 8 as well, and so is the batch."""
    torch.manual_seed(0)
    eager = OneLayer(lambda m, x: attention(m, per_head(m, x))).double()
    model, ids = copy.deepcopy(eager), torch.randint(0, 11, (8, length))
    eager(ids).square().sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="streambp", options={"chunk": 3, "loss_chunk": 3})
    compiled(ids).square().sum().backward()
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and all(segment.chunked for segment in schedule.segments)
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12)
