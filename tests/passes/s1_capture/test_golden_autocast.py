"""autocast: the casts that autocast makes inside ops become ops of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, source, stages
from torch import Tensor

aten = torch.ops.aten


def cast(function: Callable[..., Any], name: str, around: bool = False) -> Stages:
    """Compare what the pass makes of a function, run under autocast or not, with its golden file."""
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        found = stages(Small(function), ids())
    where = "# run under autocast to bfloat16\n" if around else ""
    check_golden(
        f"{where}{source(function)}\n\n{found.change('capture', 'autocast')}", __file__, f"autocast_{name}"
    )
    return found


def casts(found: Stages) -> list[str]:
    """What is cast to what."""
    nodes = found.facts.module.graph.find_nodes(op="call_function", target=aten.to.dtype)
    return sorted(f"{found.words.name(n.args[0])} {n.args[1]}" for n in nodes)  # type: ignore[union-attr]


def product(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.first(x) + m.first(x + 1)


def test_operands_of_a_product_are_cast() -> None:
    """A weight that is read twice is cast once."""
    found = cast(product, "product", around=True)
    assert casts(found) == [f"{n} torch.bfloat16" for n in ("add", "embedding", "first.weight")]


def test_without_autocast_nothing_is_cast() -> None:
    assert not casts(cast(product, "off"))


def region(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    with torch.autocast("cpu", torch.bfloat16):
        y = m.first(x)
    return m.second(x) + y


def test_a_region_that_asks_for_what_is_on_leaves_no_trace() -> None:
    found = cast(region, "region", around=True)
    assert casts(found) == [f"{n} torch.bfloat16" for n in ("embedding", "first.weight", "second.weight")]
    assert not [n for n in found.facts.module.graph.nodes if "autocast" in str(n.target)]


def switched_off(m: Small, ids: Tensor) -> Tensor:
    x = m.first(m.embed(ids)).float()
    with torch.autocast("cpu", enabled=False):
        y = F.linear(x, m.second.weight)
    return y


@pytest.mark.parametrize("function, around", [(region, False), (switched_off, True)])
def test_a_region_has_the_dtypes_of_eager(function: Callable[..., Any], around: bool) -> None:
    module = Small(function)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        found, wanted = stages(module, ids()), module(ids())
    products = found.facts.module.graph.find_nodes(op="call_function", target=aten.linear.default)
    dtypes = {m.meta["val"].dtype for m in products}
    assert torch.bfloat16 in dtypes and wanted.dtype == torch.float32 and torch.float32 in dtypes


def widest(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return torch.cat([x, m.first(x)], 1)


def test_an_op_that_takes_the_widest_operand() -> None:
    found = cast(widest, "widest_operand", around=True)
    assert "linear torch.float32" in casts(found)


def own_dtype(m: Small, ids: Tensor) -> Tensor:
    x = m.first(m.embed(ids))
    return x.sum(-1, dtype=torch.float32) + x.relu().sum(-1)


def test_an_op_that_is_given_a_dtype_converts_its_operands_itself() -> None:
    assert casts(cast(own_dtype, "own_dtype", around=True)) == [
        "embedding torch.bfloat16", "first.weight torch.bfloat16",
    ]  # fmt: skip
