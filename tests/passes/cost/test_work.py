"""What a program computes and moves, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from streambp_fx.passes.cost.program import program_cost
from streambp_fx.passes.cost.work import Work

aten = torch.ops.aten


def work_of(function: Callable[..., Any], *given: Tensor) -> Work:
    """The work of a function on float32 tensors of any shapes, as numbers."""
    module = make_fx(function, tracing_mode="fake")(*given)
    return program_cost(module, {}).work.map(int)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def test_a_product_reads_and_writes_each_operand_once() -> None:
    found = work_of(lambda a, b: a @ b, rand(3, 5), rand(5, 7))
    assert found == Work(products=2 * 3 * 5 * 7, product_bytes=4 * (15 + 35 + 21), calls=1)


def test_views_move_nothing_and_what_is_broadcast_is_read_once() -> None:
    assert work_of(lambda a: a.t().contiguous(), rand(3, 5)) == Work(bytes=2 * 60, calls=1), "a copy"
    assert work_of(lambda a: a.t().unsqueeze(0)[0], rand(3, 5)) == Work()
    found = work_of(lambda a, b: a + b.expand(3, 5), rand(3, 5), rand(5))
    assert found == Work(bytes=4 * (15 + 5 + 15), calls=1)


def test_what_is_changed_in_place_is_read_and_written() -> None:
    found = work_of(lambda a, b: aten.add_(a, b), rand(3, 5), rand(3, 5))
    assert found == Work(bytes=4 * 3 * 15, calls=1)


def test_a_table_is_not_read_whole() -> None:
    found = work_of(lambda w, i: aten.embedding(w, i), rand(1000, 4), torch.zeros(6, dtype=torch.int64))
    assert found == Work(bytes=4 * 2 * 24, calls=1)


def test_attention_has_operations_of_its_own() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        return torch.autograd.grad(out.sum(), leaves)

    found = work_of(step, *(rand(2, 3, n, 8) for n in (4, 6, 6)))
    pairs = 2 * 3 * 4 * 6 * 8
    assert (found.attention, found.attention_backward, found.products) == (4 * pairs, 10 * pairs, 0)
    assert found.flops == 14 * pairs and found.product_bytes > 0


GROUPED = {
    "rows by group": ((24, 8), (2, 8, 16)),
    "sums over groups": ((8, 24), (24, 16)),
    "columns by group": ((2, 8, 16), (16, 24)),
    "as many products": ((2, 24, 8), (2, 8, 16)),
}


@pytest.mark.parametrize("form", GROUPED)
def test_grouped_products(form: str) -> None:
    """Of 24 rows, with sizes 8 and 16: the same however the groups are; twice that for two whole products."""
    left, right = GROUPED[form]
    given = [rand(*left).bfloat16(), rand(*right).bfloat16()]
    if form != "as many products":
        given.append(torch.tensor([8, 24], dtype=torch.int32))
    found = work_of(lambda a, b, *offs: aten._grouped_mm(a, b, *offs), *given)
    assert found.products == 2 * 24 * 8 * 16 * (2 if form == "as many products" else 1) and found.calls == 1


def test_operations_are_those_that_pytorch_counts() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.bmm(torch.addmm(c, a, b).unsqueeze(0), b.t().unsqueeze(0)).relu()

    given = rand(3, 5), rand(5, 7), rand(7)
    with FlopCounterMode(display=False) as counter:
        function(*given)
    assert work_of(function, *given).flops == counter.get_total_flops()


def test_parts_are_added_and_mapped() -> None:
    one = Work(1, 2, 3, 4, 5, 6, 7)
    assert one + one == one.map(lambda part: 2 * part) and one.flops == 6
    assert one.operations == Work(1, 2, 3)
