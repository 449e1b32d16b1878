"""custom_rows: are the rows of a custom autograd function made of the rows of what it reads?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from custom_functions import Clipped, Function, StraightThrough
from golden import check_golden
from golden_graphs import Small, Stages, ids, needs_symbols, sections, source, stages
from torch import Tensor
from torch.fx import Node

from streambp_fx.passes.graph.autograd_functions import CustomFunction

pytestmark = needs_symbols  # and Dynamo hands over such functions in another way


class Normalised(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        return scale * gradient - x * scale**3 * (x * gradient).mean(-1, keepdim=True)


class Ahead(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(1)


class Behind(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


class Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 / x.shape[1]


class Product(torch.autograd.Function):
    """x, w -> x w^T, with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


def called(function: Any, *more: str) -> tuple[Stages, Node]:
    """Compare what is found of a function of hidden states and parameters with its golden file."""

    def forward(m: Small, ids: Tensor) -> Tensor:
        return m.head(function.apply(m.embed(ids), *(m.get_parameter(n) for n in more)))

    found = stages(Small(forward), ids())
    facts, words = found.facts, found.words
    (node,) = (n for n in facts.nodes if isinstance(n.target, CustomFunction))
    layout = ", ".join("-" if axis is None else str(axis) for axis in facts.layouts[node] or ())
    verdict = f"refused: {facts.refusals[node]}" if node in facts.refusals else f"rows: [{layout}]"
    text = sections(source(function), found.programs["axes"], f"{words.name(node)}: {verdict}")
    check_golden(text, __file__, f"custom_rows_{function.__name__.lower()}")
    return found, node


@pytest.mark.parametrize("function", [Function, StraightThrough, Clipped])
def test_elementwise_on_one_shape(function: Any) -> None:
    found, node = called(function)
    assert node not in found.facts.refusals


def of_a_weight(function: Any) -> Stages:
    """All passes on a product with what a function makes of a weight."""

    def forward(m: Small, ids: Tensor) -> Tensor:
        return F.linear(m.embed(ids), function.apply(m.first.weight))

    return stages(Small(forward), ids())


def test_a_weight_that_each_chunk_makes_anew() -> None:
    """Its gradients come chunk by chunk, and not as a sum: only a linear backward may see them so."""
    assert not of_a_weight(StraightThrough).refused
    clipped = of_a_weight(Clipped).refused
    check_golden(sections(source(Clipped), clipped), __file__, "custom_rows_weight")
    assert "whose backward may not be linear" in clipped


def test_a_backward_that_computes_something_is_linear() -> None:
    assert not of_a_weight(Function).refused


def test_rows_by_the_rules_of_its_ops() -> None:
    found, node = called(Normalised)
    assert node not in found.facts.refusals


def test_a_forward_that_reads_other_rows() -> None:
    found, node = called(Ahead)
    assert "flip" in found.facts.refusals[node]


def test_a_backward_that_reads_other_rows() -> None:
    """NOTE [both directions]: the forward alone would be no reason."""
    found, node = called(Behind)
    assert "reduction over the sequence axis" in found.facts.refusals[node]


def test_a_function_that_counts_its_rows() -> None:
    found, node = called(Counted)
    assert node in found.facts.refusals


def test_a_function_that_makes_the_gradient_of_a_weight() -> None:
    found, node = called(Product, "first.weight")
    assert "gradient of a weight" in found.facts.refusals[node]
