"""Rewrites of traced programs: applied where they are sound and worth it, with the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.cost.program import program_cost
from streambp_fx.passes.s5_lower.simplify import simplify
from streambp_fx.passes.s5_lower.write_in_place import write_in_place

T = torch.Tensor
aten = torch.ops.aten
ROWS, WIDTH, RANK = 7, 6, 2


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, T]:
    """Rows of a batch of one, weights, an adapter's two weights and a buffer for a gradient."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "x": (1, ROWS, WIDTH), "g": (1, ROWS, WIDTH), "w": (WIDTH, WIDTH), "a": (RANK, WIDTH),
        "b": (WIDTH, RANK), "v": (1, ROWS, 1), "buffer": (WIDTH, RANK),
    }  # fmt: skip
    return {k: torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for k, s in shapes.items()}


def traced(case: Callable[..., Any], given: dict[str, T]) -> GraphModule:
    with torch.no_grad():
        return make_fx(lambda *args: case(*args), tracing_mode="fake")(*given.values())


def ops_of(module: GraphModule) -> Counter[Any]:
    return Counter(n.target for n in module.graph.nodes if n.op == "call_function")


def check(case: Callable[..., Any], dtype: torch.dtype = torch.float64) -> tuple[Counter[Any], Counter[Any]]:
    """Ops before and after; the values, what is written and the peak are compared, with `reuse` as well."""
    given = inputs(dtype)
    expected = {k: v.clone() for k, v in given.items()}
    want = case(*expected.values())
    before, after = traced(case, given), traced(case, given)
    simplify(after.graph)
    after.graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "call_function" or _changes(n))
    after.graph.lint()
    found = ops_of(before), ops_of(after)
    assert all("val" in n.meta for n in after.graph.nodes if n.op == "call_function")
    for writes_over in (False, True):
        if writes_over:
            write_in_place(before.graph)
            write_in_place(after.graph)
            sizes = [program_cost(m, {}).peak for m in (before, after)]
            assert sizes[1] <= sizes[0], "the peak grew"
        after.recompile()
        got_from = {k: v.clone() for k, v in given.items()}
        got = after(*got_from.values())
        pairs = [*zip(_list(want), _list(got), strict=True), *((expected[k], got_from[k]) for k in given)]
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 0.1)
        for first, second in pairs:
            assert first.dtype == second.dtype and first.stride() == second.stride()
            torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
    return found


def _changes(node: Any) -> bool:
    return getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable


def _list(value: Any) -> list[T]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# ---- sums with products


def adapter(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return x @ w + (x @ a.t()) @ b.t() * 2.0


def scaled_first(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    thin = ((x @ a.t()) @ b.t()) / 4
    return thin + x @ w


def plain_matrices(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return w + -(b @ a)


@pytest.mark.parametrize("case", [adapter, scaled_first, plain_matrices], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_goes_into_the_product(case: Callable[..., Any], dtype: torch.dtype) -> None:
    _, after = check(case, dtype)
    assert after[aten.addmm.default] == 1 and not after[aten.add.Tensor]
    assert not any(after[op] for op in (aten.mul.Tensor, aten.div.Tensor, aten.neg.default))


def test_the_sum_is_written_over_its_operand_that_dies() -> None:
    module = traced(adapter, inputs())
    simplify(module.graph)
    write_in_place(module.graph)
    assert aten.addmm_.default in ops_of(module) and aten.addmm.default not in ops_of(module)


def read_elsewhere(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    product = (x @ a.t()) @ b.t() * 2.0
    return x @ w + product, product.exp()


def returned_as_well(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    product = x @ w
    return (x * v).view(ROWS, WIDTH) + product.view(ROWS, WIDTH), product


def matrix_read_elsewhere(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    base = (w * 2).exp()
    product = w @ w
    return base + product, product.exp()


def broadcast(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return v[0] + x[0] @ w


def other_dtype(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return x[0].to(torch.float32) + x[0] @ w


def twice(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    product = x @ w
    return product + product


def other_order(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return w.t() @ w + (w @ w).t()


def with_alpha(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return torch.add(x @ w, (x @ a.t()) @ b.t(), alpha=3)


def wide_factors_would_wait(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    """Both factors of the product are made here: kept until the sum they would be alive beside it."""
    product = (w * 2).exp() @ (w * 3).exp()
    return product + (w + 1).exp().view(WIDTH, WIDTH)


@pytest.mark.parametrize(
    "case",
    [
        read_elsewhere,
        matrix_read_elsewhere,
        broadcast,
        other_dtype,
        twice,
        with_alpha,
        returned_as_well,
        wide_factors_would_wait,
    ],
    ids=lambda c: c.__name__,
)
def test_a_sum_stays(case: Callable[..., Any]) -> None:
    before, after = check(case)
    assert not after[aten.addmm.default] and after[aten.add.Tensor] == before[aten.add.Tensor]


def test_a_product_seen_transposed_is_not_added_as_it_is() -> None:
    """The other product may be the one that is added to; the values say whether the right one was."""
    check(other_order)


def changed_between(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    base = buffer.view(WIDTH, RANK)
    product = w @ b
    old = base * 1.0
    base.add_(1.0)
    return base + product + old


def factor_changed_between(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    product = (buffer * 1.5) @ a
    thin = buffer @ a
    buffer.mul_(2.0)
    return thin + (w + product).exp() @ w


@pytest.mark.parametrize("case", [changed_between, factor_changed_between], ids=lambda c: c.__name__)
def test_nothing_is_read_on_the_other_side_of_a_change(case: Callable[..., Any]) -> None:
    check(case)


# ---- sums with elementwise products


def elementwise(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return x.exp() + g * v


def elementwise_read_elsewhere(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    first = x.exp()
    product = g * v
    return first + product, product


def elementwise_grows(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return x + v * v


def elementwise_other_dtype(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return x.to(torch.float32).exp() + g * v


def made_later(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    """Factors would be kept while what is added is made."""
    product = g.exp() * x.exp()
    return (x * 3).exp() + product


@pytest.mark.parametrize(
    "case, dtype, expected",
    [
        (elementwise, torch.float64, 1),
        (elementwise, torch.float32, 1),
        (elementwise, torch.bfloat16, 0),
        (elementwise_read_elsewhere, torch.float64, 0),
        (elementwise_grows, torch.float64, 0),
        (elementwise_other_dtype, torch.float64, 0),
        (made_later, torch.float64, 0),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_sum_with_an_elementwise_product(case: Any, dtype: torch.dtype, expected: int) -> None:
    assert check(case, dtype)[1][aten.addcmul.default] == expected


def test_a_product_with_a_number_of_the_program() -> None:
    """Such a number is a node of the graph, but no tensor."""

    def case(x: T) -> T:
        return x.exp() + x * (x.shape[1] / 50)

    x = inputs()["x"]
    module = make_fx(case, tracing_mode="symbolic")(x)
    simplify(module.graph)
    module.recompile()
    assert ops_of(module)[aten.addcmul.default] == 0
    torch.testing.assert_close(module(x), case(x))


# ---- gradients of slices


def halves(x: T, g: T, first: tuple[int, int], second: tuple[int, int]) -> T:
    parts = [
        aten.slice_backward.default(source[:, :, a:b].neg(), [1, ROWS, WIDTH], 2, a, b, 1)
        for source, (a, b) in ((x, first), (g, second))
    ]
    return parts[0] + parts[1]


@pytest.mark.parametrize(
    "first, second, joined",
    [((0, 3), (3, 6), True), ((2, 6), (0, 2), True), ((0, 3), (2, 6), False), ((0, 3), (4, 6), False)],
)
def test_gradients_of_two_slices(first: Any, second: Any, joined: bool) -> None:
    _, after = check(lambda x, g, *rest: halves(x, g, first, second))
    assert bool(after[aten.cat.default]) == joined


def test_gradient_of_a_slice_that_is_read_elsewhere_keeps_its_zeros() -> None:
    def case(x: T, g: T, *rest: T) -> tuple[T, T]:
        first = aten.slice_backward.default(x[:, :, :3].neg(), [1, ROWS, WIDTH], 2, 0, 3, 1)
        second = aten.slice_backward.default(g[:, :, 3:].neg(), [1, ROWS, WIDTH], 2, 3, 6, 1)
        return first + second, first

    assert not check(case)[1][aten.cat.default]


# ---- scalars


def cotangent(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    """The backward of an adapter: gradients of both weights, and of what it read."""
    scaled = (g * 2.0).view(-1, WIDTH)
    hidden = x.view(-1, WIDTH) @ a.t()
    aten.addmm_.default(buffer, scaled.t(), hidden)
    thin = scaled @ b
    return thin @ a + g.view(-1, WIDTH) @ w


def test_a_scalar_goes_into_the_products_that_read_it() -> None:
    before, after = check(cotangent)
    assert before[aten.mul.Tensor] == 1 and not after[aten.mul.Tensor]


def test_a_scalar_that_cannot_vanish_goes_to_the_thin_product() -> None:
    module = traced(lambda x, g, w, a, b, v, buffer: ((g * 2.0).view(-1, WIDTH) @ b).exp(), inputs())
    simplify(module.graph)
    (multiple,) = (n for n in module.graph.nodes if n.target is aten.mul.Tensor)
    assert multiple.args[0].target is aten.mm.default


def squared(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    scaled = b * 3.0
    return aten.addmm.default(w, scaled, scaled.t()) + aten.mm.default(scaled.t(), scaled).sum()


def square(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    scaled = w * 3.0
    return aten.addmm.default(g[0, :6], scaled, scaled)


def test_a_scalar_counts_as_often_as_it_is_read() -> None:
    check(squared)
    _, after = check(square)
    assert not after[aten.mul.Tensor]


def scalar_read_elsewhere(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    scaled = (g * 2.0).view(-1, WIDTH)
    return scaled @ b, scaled.exp()


def scalar_to_a_wider_product(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return ((b * 2.0) @ a).exp()


def scalar_added_to(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    return aten.addmm.default(w * 2.0, w, w)


def scalar_returned(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> tuple[T, T]:
    scaled = (g * 2.0).view(-1, WIDTH)
    return scaled @ b, scaled


def scalar_changed_later(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    scaled = buffer * 2.0
    buffer.add_(1.0)
    return scaled.t() @ w


@pytest.mark.parametrize(
    "case",
    [
        scalar_read_elsewhere, scalar_to_a_wider_product, scalar_added_to, scalar_returned,
        scalar_changed_later,
    ],
    ids=lambda c: c.__name__,
)  # fmt: skip
def test_a_scalar_stays(case: Callable[..., Any]) -> None:
    module = traced(case, inputs())
    simplify(module.graph)
    multiples = [n for n in module.graph.nodes if n.target is aten.mul.Tensor]
    assert len(multiples) == 1 and multiples[0].args[0].target is not aten.mm.default
    check(case)


def test_in_half_precision_a_scalar_goes_only_where_it_vanishes() -> None:
    def narrow(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
        return (g * 3.0).view(-1, WIDTH) @ b

    def gone(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
        return aten.addmm_.default(buffer, (g * 3.0).view(-1, WIDTH).t(), x.view(-1, WIDTH) @ b)

    for case, stays in ((narrow, True), (gone, False)):
        module = traced(case, inputs(torch.bfloat16))
        simplify(module.graph)
        multiples = [n for n in module.graph.nodes if n.target is aten.mul.Tensor]
        assert bool(multiples) == stays and all(n.args[0].op == "placeholder" for n in multiples)


def norm(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
    """The backward of a mean of squares."""
    return (v.expand(1, ROWS, WIDTH) / WIDTH) * (torch.pow(x, 1.0) * 2.0)


@pytest.mark.parametrize("dtype, wide", [(torch.float64, 1), (torch.bfloat16, 2)])
def test_scalars_go_to_what_is_expanded(dtype: torch.dtype, wide: int) -> None:
    given = inputs(dtype)
    module = traced(norm, given)
    simplify(module.graph)
    counted = [
        n for n in module.graph.nodes if n.op == "call_function" and n.target is not aten.expand.default
    ]
    assert sum(n.meta["val"].shape[-1] == WIDTH for n in counted) == wide
    check(norm, dtype)


def test_by_one() -> None:
    _, after = check(lambda x, g, *rest: ((x**1) * 1.0 / 1).exp())
    assert after == Counter({aten.exp.default: 1})


def test_a_replacement_has_the_strides_of_what_it_replaces() -> None:
    """The product by one makes of an expanded value one that can be seen as a matrix."""
    _, after = check(lambda x, g, w, a, b, v, buffer: (v.expand(1, ROWS, WIDTH) * 1.0).view(-1, WIDTH) @ w)
    assert after[aten.mul.Tensor] == 1


def test_what_is_returned_or_changed_stays_a_value_of_its_own() -> None:
    def changed(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
        old = buffer * 1.0
        buffer.add_(1.0)
        return old.exp()

    module = traced(lambda x, *rest: (x * 1.0).view(-1), inputs())
    simplify(module.graph)
    assert aten.mul.Tensor in ops_of(module)
    assert check(changed)[1][aten.mul.Tensor] == 1


# ---- views


def test_views_that_undo_each_other_go() -> None:
    _, after = check(lambda x, g, w, *rest: (x.view(-1, WIDTH).view(x.shape).exp(), w.t().t().exp()))
    assert not after[aten.view.default] and not after[aten.t.default]
    _, after = check(lambda x, g, w, *rest: x.view(-1, WIDTH).view(1, WIDTH, -1).exp())
    assert after[aten.view.default]


def test_views_follow_what_they_are_taken_of() -> None:
    """`reuse` must know where the view lies: a value is read through it after the last use of its own."""

    def case(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
        made = x.exp()
        seen = (made * 1.0).view(-1, WIDTH)
        other = made.neg()
        return other.view(-1, WIDTH) + seen @ w

    check(case)


def test_new_nodes_say_where_they_come_from() -> None:
    module = traced(cotangent, inputs())
    for k, node in enumerate(module.graph.nodes):
        node.meta["origin"] = node.meta["stack_trace"] = f"line {k}"
    simplify(module.graph)
    assert all("origin" in n.meta and "stack_trace" in n.meta for n in module.graph.nodes)


def test_float32_parts_of_a_double_program_are_left_as_they_are() -> None:
    """Where a norm is computed in float32, another order of rounding is the whole error of a gradient."""

    def norm(x: T, g: T, w: T, a: T, b: T, v: T, buffer: T) -> T:
        narrow = x.float()
        spread = v.float().expand(1, ROWS, WIDTH) * 0.5
        return (narrow * spread + g.float() * narrow).to(x.dtype)

    before, after = check(norm)
    assert before == after
    assert check(norm, torch.float32)[1][aten.addcmul.default] == 1
