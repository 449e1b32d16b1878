"""Ops of other packages whose backward reads values, so that no trace has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, compare, in_double, transform
from e2e_models import DEVICE, HIDDEN, build, padded, plain, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx.passes.graph.determinism import DETERMINISTIC
from streambp_fx.passes.rules import registry
from streambp_fx.passes.s4_trace import foreign_ops

GROUPS = 4


def grouped(rows: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Each row times the matrix of its group, which is the place of its greatest entry."""
    group = rows.argmax(-1) % GROUPS
    return torch.stack([scale * rows @ w for w in weight], -1).gather(
        -1, group[..., None, None].expand(*rows.shape, 1)
    )[..., 0]


@torch.library.custom_op("streambp_tests::grouped", mutates_args=())
def grouped_op(rows: Tensor, weight: Tensor, scale: float) -> Tensor:
    return grouped(rows, weight, scale)


@grouped_op.register_fake
def _(rows: Tensor, weight: Tensor, scale: float) -> Tensor:
    return torch.empty_like(rows)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.scale = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    rows, weight = ctx.saved_tensors
    of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    group = rows.argmax(-1) % GROUPS
    for g in sorted(set(group.flatten().tolist())):  # how often depends on values
        chosen = (group == g)[..., None]
        own = ctx.scale * gradient * chosen
        of_rows = of_rows + own @ weight[g].t()
        of_weight[g] += torch.einsum("bti,btj->ij", rows * chosen, own)
    return of_rows, of_weight, None


torch.library.register_autograd("streambp_tests::grouped", _backward, setup_context=_setup)


class Grouped(nn.Module):
    """In place of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = (GROUPS, HIDDEN, HIDDEN)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.streambp_tests.grouped(x, self.weight, 0.7)


def model_of() -> Any:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp = Grouped().to(DEVICE)
    return model


BATCHES = {"T=67": plain(2, 67), "T=17": plain(2, 17), "left": padded(50, "left")}


@pytest.fixture
def a_rule() -> Any:
    """The op acts on the last dim alone, and draws no random numbers."""
    before, known = dict(registry.RULES), set(DETERMINISTIC)

    @registry.rule("streambp_tests::grouped")
    def rule(ctx: Any, node: Any) -> Any:
        return ctx.layout(node.args[0])

    yield
    registry.RULES.clear()
    registry.RULES.update(before)
    DETERMINISTIC.clear()
    DETERMINISTIC.update(known)


@pytest.mark.usefixtures("a_rule")
@pytest.mark.parametrize("options", sample([{}, {"save": "attention"}], {}), ids=str)
def test_exact_and_streamed(options: dict[str, Any]) -> None:
    known = len(foreign_ops._calls)
    with in_double(model_of):
        eager = model_of()
        streamed = transform(copy.deepcopy(eager), **options)
        compare(eager, streamed, BATCHES, 1e-9)
        assert_all_chunked(streamed, at_least=2)
    assert streambp_fx.schedule(streamed).check.status == "agrees"
    assert len(foreign_ops._calls) > known, "its backward was traced"
