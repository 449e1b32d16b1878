"""Gradients of experts are added to their sums a part at a time: the same sums, with a fourth beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.cost.live_bytes import LiveBytes
from streambp_fx.passes.s5_lower.accumulate import GROUPED, PARTS, accumulate

GROUPS, ROWS, INNER = 3, 20, 16
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
GRADIENTS: dict[str, Gradient] = {
    "as it is": lambda a, b, ends: GROUPED(a.t(), b, ends),
    "transposed": lambda a, b, ends: GROUPED(a.t(), b, ends).transpose(-2, -1),
    "transposed twice": lambda a, b, ends: GROUPED(a.t(), b, ends).transpose(1, 2).transpose(-1, -2),
}


def lowered(gradient: Gradient, columns: int, total: torch.dtype) -> tuple[GraphModule, list[Tensor]]:
    """A program that adds a gradient to a sum, and its inputs, the last of which is the sum."""
    torch.manual_seed(columns)
    rows = [torch.randn(ROWS, n, dtype=torch.bfloat16) for n in (INNER, columns)]
    ends = torch.tensor([5, 5, ROWS], dtype=torch.int32)
    given = [*rows, ends]
    given.append(torch.randn(gradient(*given).shape, dtype=total))
    module = make_fx(lambda a, b, ends, _: [gradient(a, b, ends)], tracing_mode="fake")(*given)
    accumulate(module.graph, 1, eager=True)
    module.graph.eliminate_dead_code(
        lambda n: n.op == "output" or n.op == "placeholder" or "_." in str(n.target)
    )
    module.recompile()
    return module, given


@pytest.mark.parametrize("total", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_same_sum(name: str, total: torch.dtype) -> None:
    module, given = lowered(GRADIENTS[name], 64, total)
    expected = given[-1] + GRADIENTS[name](*given[:-1])
    assert len(module.graph.find_nodes(op="call_function", target=GROUPED)) == PARTS
    before = given[-1].data_ptr()
    module(*given)
    assert given[-1].data_ptr() == before
    torch.testing.assert_close(given[-1], expected.to(total), rtol=1e-2, atol=1e-2)


def test_no_gradient_of_all_experts() -> None:
    module, given = lowered(GRADIENTS["transposed"], 64, torch.float32)
    with LiveBytes(given) as meter:
        module(*given)
    assert meter.peak < 1.1 * GROUPS * INNER * 64 * 2 / PARTS * 2


@pytest.mark.parametrize("columns", [24, 40])
def test_columns_that_kernels_want_together(columns: int) -> None:
    module, given = lowered(GRADIENTS["as it is"], columns, torch.float32)
    expected = given[-1] + GRADIENTS["as it is"](*given[:-1])
    assert len(module.graph.find_nodes(op="call_function", target=GROUPED)) == 1
    module(*given)
    torch.testing.assert_close(given[-1], expected)
