"""A rewrite keeps values, whatever the rank, with operands read twice or broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes import CapturedGraph
from streambp_fx.passes.graph.facts import tensors_of
from streambp_fx.passes.rules.registry import rule_of
from streambp_fx.passes.s1_capture import normalize as module
from streambp_fx.passes.s1_capture.normalize import RewriteError, normalize

aten = torch.ops.aten


def normal(function: Callable[..., Any], *given: Tensor) -> GraphModule:
    found = make_fx(function, pre_dispatch=True, tracing_mode="symbolic")(*given)
    normalize(CapturedGraph(found))
    return found


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a square": lambda h: h * h,
    "twice": lambda h: h + h,
    "less itself, by halves": lambda h: torch.sub(h, h, alpha=0.5),
    "three times": lambda h: torch.addcmul(h, h, h),
    "by its own size": lambda h: h / h.square(),
    "where": lambda h: torch.where(h > 0, h, h * 0.1),
    "of one operand": lambda h: (h * 2).tanh(),
    "a product": lambda h: F.linear(h * h, torch.ones(3, 5, dtype=h.dtype)),
    "of one column": lambda h: h * h[..., :1],
}
SLICES = {
    "first": lambda y: y[:, :1],
    "last": lambda y: y[:, -1:],
    "all but the last": lambda y: y[:, :-1],
    "every second": lambda y: y[:, ::2],
    "all but the first": lambda y: y[:, 1:],
}


@pytest.mark.parametrize(
    ("part", "left"),
    [
        (lambda y: y[:, -y.shape[1] :], 0),
        (lambda y: y[:, : y.shape[1] + 3], 0),
        (lambda y: y[:, -100:], 0),
        (lambda y: y[:, -y.shape[1] + 1 :], 1),
        (lambda y: y[:, ::2], 1),
    ],
    ids=[
        "from its length before the end",
        "beyond its end",
        "before its beginning",
        "all but one",
        "every second",
    ],
)
def test_a_slice_of_everything_is_the_value(part: Callable[[Tensor], Tensor], left: int) -> None:
    (h,) = drawn((2, 7, 5))
    function = lambda x: part(x.tanh()) * 2  # noqa: E731
    module = normal(function, h)
    assert len(module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)) == left
    torch.testing.assert_close(module(h), function(h))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("part", SLICES)
def test_slices_of_rows(rows: str, part: str) -> None:
    (h,) = drawn((2, 7, 5))
    function = lambda x: SLICES[part](ROWS[rows](x))  # noqa: E731
    torch.testing.assert_close(normal(function, h)(h), function(h))


def test_what_reads_a_tensor_twice_is_sliced_before_it() -> None:
    (h,) = drawn((2, 7, 5))
    found = normal(lambda x: (x * x)[:, :-1], h)
    product = next(n for n in found.graph.nodes if n.target is aten.mul.Tensor)
    assert {n.target for n in product.all_input_nodes} == {aten.slice.Tensor}


REPEATED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    # queries, keys, along which dim keys are repeated, how often
    "heads": ((2, 4, 7, 3), (2, 2, 7, 3), 1, 2),
    "heads, counted from the end": ((2, 4, 7, 3), (2, 2, 7, 3), -3, 2),
    "rows of three dims": ((2, 6, 3), (2, 3, 3), 1, 2),
    "columns": ((2, 4, 6, 3), (2, 4, 3, 3), 2, 2),
    "heads of which one is asked for": ((2, 1, 7, 3), (2, 2, 7, 3), 1, 2),
    "one sample for all": ((1, 4, 7, 3), (2, 2, 7, 3), 1, 2),
    "five dims": ((2, 4, 2, 7, 3), (2, 2, 2, 7, 3), 1, 2),
    "once": ((2, 4, 7, 3), (2, 4, 7, 3), 1, 1),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("causal", [False, True])
def test_repeated_keys(name: str, causal: bool) -> None:
    queries, keys, dim, count = REPEATED[name]
    given = drawn(queries, keys, keys)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(count, dim) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = normal(attention, *given)
    torch.testing.assert_close(found(*given), attention(*given))
    handed = aten.repeat_interleave.self_int not in {n.target for n in found.graph.nodes}
    assert handed == name.startswith("heads, ") or handed == (name == "heads")


OTHER_NAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "multiply": lambda h: torch.multiply(h, 2.0) + torch.multiply(h, h),
    "divide and subtract": lambda h: torch.subtract(torch.divide(h, 3.0), h),
    "concat": lambda h: torch.concat([h, h * 2], -1) + torch.concatenate([h * 2, h], dim=2),
    "swapaxes": lambda h: torch.swapaxes(h, 1, 2).swapaxes(1, 2) + h.swapdims(0, 1).swapdims(0, 1),
    "negative": lambda h: torch.negative(h).absolute() * torch.greater(h, 0.1),
    "special": lambda h: torch.special.expit(h) + torch.special.exp2(h),
    "within a function": lambda h: torch.multiply(torch.absolute(h), torch.negative(h)),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_of_ops(name: str) -> None:
    (h,) = drawn((2, 7, 5))
    found = normal(OTHER_NAMES[name], h)
    torch.testing.assert_close(found(h), OTHER_NAMES[name](h))
    unknown = [n.target for n in found.graph.nodes if n.op == "call_function" and rule_of(n.target) is None]
    assert unknown == []
    assert not [n for n in found.graph.nodes for t in tensors_of(n) if str(t.shape[1]) == "7"], "a fixed size"


def test_a_wrong_rewrite_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrower(graph: Graph, node: Node) -> Node:
        return module.insert(graph, node, aten.slice.Tensor, node.args[0], 1, 0, 1)

    def rounded(graph: Graph, node: Node) -> Node:
        return module.insert(graph, node, aten.to.dtype, node.args[0], torch.float32)

    (h,) = drawn((2, 7))
    for wrong, what in ((narrower, "shape"), (rounded, "float32")):
        monkeypatch.setitem(module.REWRITES, aten.sinh.default, [wrong])
        with pytest.raises(RewriteError, match=f"{wrong.__name__} made .*{what}"):
            normal(torch.sinh, h)


ROW_INDICES: dict[str, Callable[[int], Tensor]] = {
    "expanded": lambda n: torch.arange(n).unsqueeze(1).expand(-1, 3).reshape(-1),
    "expanded, with sizes": lambda n: torch.arange(n).view(n, 1).expand(n, 3).flatten(),
    "repeated": lambda n: torch.arange(0, n)[:, None].repeat(1, 3).view(-1),
    "interleaved": lambda n: torch.arange(n).repeat_interleave(3),
    "of three dims": lambda n: torch.arange(n).view(1, n, 1).expand(1, n, 3).reshape(-1),
}
OTHER_INDICES: dict[str, Callable[[int], Tensor]] = {
    "all rows three times": lambda n: torch.arange(n).unsqueeze(0).expand(3, -1).reshape(-1),
    "tiled": lambda n: torch.arange(n).repeat(3),
    "from one on": lambda n: torch.arange(1, n).unsqueeze(1).expand(-1, 3).reshape(-1),
    "fewer rows": lambda n: torch.arange(n - 1).unsqueeze(1).expand(-1, 3).reshape(-1),
    "turned round": lambda n: torch.arange(n).flip(0).unsqueeze(1).expand(-1, 3).reshape(-1),
    "every second": lambda n: torch.arange(0, n, 2).unsqueeze(1).expand(-1, 3).reshape(-1),
    "across": lambda n: torch.arange(n).unsqueeze(1).expand(-1, 3).t().reshape(-1),
}


@pytest.mark.parametrize("form", [*ROW_INDICES, *OTHER_INDICES])
@pytest.mark.parametrize("shape", [(7, 5), (3, 3, 2)])
def test_rows_that_are_repeated_by_an_index(form: str, shape: tuple[int, ...]) -> None:
    """They are repeated, so known to be by rows; another index stays one, also where sizes coincide."""
    index = {**ROW_INDICES, **OTHER_INDICES}[form]
    (h,) = drawn(shape)
    function = lambda x: x[index(x.shape[0])]  # noqa: E731
    found = normal(function, h)
    assert torch.equal(found(h), function(h))
    if form in ROW_INDICES:
        assert not found.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    else:
        assert found.graph.find_nodes(op="call_function", target=aten.index.Tensor)
