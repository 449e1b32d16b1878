"""A program with some of its outputs: what is dead is left out, and no change in place that somebody sees."""

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.s5_lower.lower import restrict

aten = torch.ops.aten


def program(rows: Tensor, sums: Tensor, x: Tensor) -> list[Tensor]:
    """Two values that are changed through a view, and inputs of which one is written and one added to."""
    value, other = x * 2, x * 3
    value[1:].neg_()
    other[1:].mul_(5)
    rows.copy_(x)
    sums.add_(value)
    return [value.sum(), other.sum()]


@pytest.fixture
def traced() -> tuple[GraphModule, list[Node]]:
    example = torch.ones(3, dtype=torch.float64)
    module = make_fx(program, tracing_mode="fake")(example.clone(), example.clone(), example)
    output = next(n for n in module.graph.nodes if n.op == "output")
    return module, list(output.args[0])


def _targets(module: GraphModule) -> list[object]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("writes", [True, False], ids=["written", "added"])
def test_one_output_is_as_in_the_whole_program(
    traced: tuple[GraphModule, list[Node]], position: int, writes: bool
) -> None:
    module, outputs = traced
    part = restrict(module, [outputs[position]], 3, writes)
    x, *buffers = torch.randn(3, dtype=torch.float64), *torch.zeros(4, 3, dtype=torch.float64)
    expected = module(*buffers[:2], x)[position]
    (found,) = part(*buffers[2:], x)
    assert torch.equal(found, expected)
    wanted, other = (2, 3) if writes else (3, 2)
    assert torch.equal(buffers[wanted], buffers[wanted - 2]) and not buffers[other].any()


def test_what_nobody_reads_is_left_out(traced: tuple[GraphModule, list[Node]]) -> None:
    module, outputs = traced
    targets = _targets(restrict(module, [outputs[0]], 3, writes=True))
    assert {aten.neg_.default, aten.copy_.default} <= set(targets)
    assert not {aten.mul_.Tensor, aten.add_.Tensor} & set(targets)
    targets = _targets(restrict(module, [outputs[1]], 3, writes=True))
    assert {aten.mul_.Tensor, aten.copy_.default} <= set(targets)
    assert not {aten.neg_.default, aten.add_.Tensor} & set(targets)
