"""The widest product in memory that is kept between calls: the same values, and the same memory again."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.s5_lower.workspace import into_workspace, widest_product
from streambp_fx.passes.s5_lower.write_in_place import write_in_place

T = torch.Tensor
aten = torch.ops.aten


def head(x: T, w: T, v: T) -> tuple[T, T]:
    """Two products; the wide one is not returned."""
    narrow = x @ v
    return (narrow @ w).log_softmax(1).exp() @ w.t(), narrow + 1


def returned(x: T, w: T, v: T) -> T:
    return torch.ops.aten.exp((x @ w) * 2)


def viewed(x: T, w: T, v: T) -> T:
    """What is returned is a view of what was written over the product."""
    return (x @ w).neg().view(-1)


def inputs(rows: int) -> tuple[T, T, T]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 3), (3, 11), (3, 3))
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)  # type: ignore[return-value]


def program(case: object, rows: int = 6) -> tuple[GraphModule, torch.fx.Node | None]:
    module = make_fx(case, tracing_mode="fake")(*inputs(rows))  # type: ignore[arg-type]
    return module, widest_product(module.graph, write_in_place(module.graph))


def test_calls_of_any_size_share_the_memory() -> None:
    module, product = program(head)
    assert product is not None and product.target is aten.mm.default
    run, workspace, places = into_workspace(module, product), torch.empty(0, dtype=torch.float64), set()
    assert product.target is aten.mm.default, "the program itself is left as it is"
    kept = []
    for rows in (9, 4, 9, 2):
        found = run(*inputs(rows), workspace.resize_(0))
        kept.append((rows, found))
        places.add(workspace.data_ptr())
    assert len(places) == 1 and workspace.untyped_storage().nbytes() == 9 * 11 * 8
    for rows, found in kept:  # nothing that was returned lies in it
        for a, b in zip(head(*inputs(rows)), found, strict=True):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("case", [returned, viewed], ids=lambda c: c.__name__)
def test_what_is_returned_is_a_tensor_of_its_own(case: object) -> None:
    assert program(case)[1] is None
