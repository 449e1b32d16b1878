"""Products, convolutions, sinks and fills in normal form give what they gave before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes import CapturedGraph
from streambp_fx.passes.s1_capture.normalize import normalize

aten = torch.ops.aten
EINSUMS = {
    "bhid,bhjd->bhij": ((2, 3, 5, 4), (2, 3, 6, 4)), "bhij,bhjd->bhid": ((2, 3, 5, 6), (2, 3, 6, 4)),
    "btd,de->bte": ((2, 5, 4), (4, 3)), "btd,ed->bte": ((2, 5, 4), (3, 4)),
    "bte,bted->btd": ((2, 5, 3), (2, 5, 3, 4)), "bthd,hde->bthe": ((2, 5, 3, 4), (3, 4, 6)),
    "bthd,hdm->btm": ((2, 5, 3, 4), (3, 4, 6)), "bi,bj->bji": ((2, 5), (2, 4)),
    "bij,bj->bi": ((2, 5, 4), (2, 4)),
    "i,j": ((5,), (4,)), "ab,cd->cadb": ((2, 5), (3, 4)), "abc,abc->": ((2, 5, 3), (2, 5, 3)),
}  # fmt: skip
KEPT = {"bij->bji": ((2, 5, 4),), "bij,bk->bi": ((2, 5, 4), (2, 3)), "ii,ij->ij": ((4, 4), (4, 5))}


def normal(
    function: Callable[..., Any], *given: Tensor, sizes: str = "symbolic"
) -> tuple[GraphModule, set[Any]]:
    """A function's graph in normal form, and the ops in it."""
    module = make_fx(function, pre_dispatch=True, tracing_mode=sizes)(*given)
    normalize(CapturedGraph(module))
    return module, {n.target for n in module.graph.nodes if n.op == "call_function"}


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str) -> None:
    given = drawn(*EINSUMS[equation])
    module, ops = normal(lambda a, b: torch.einsum(equation, a, b), *given)
    assert aten.einsum.default not in ops
    torch.testing.assert_close(module(*given), torch.einsum(equation, *given))


@pytest.mark.parametrize("equation", KEPT)
def test_einsum_that_is_no_product(equation: str) -> None:
    given = drawn(*KEPT[equation])
    module, ops = normal(lambda *x: torch.einsum(equation, *x), *given)
    assert aten.einsum.default in ops
    torch.testing.assert_close(module(*given), torch.einsum(equation, *given))


def test_an_einsum_that_broadcasts_stays() -> None:
    given = drawn((1, 5, 4), (2, 6, 4))
    assert aten.einsum.default in normal(lambda a, b: torch.einsum("bid,bjd->bij", a, b), *given)[1]


SIZES = {"fewer channels of values": (6, 4), "more channels of values": (4, 6), "one size": (4, 4)}


@pytest.mark.parametrize("sizes", SIZES)
def test_heads_of_two_sizes(sizes: str) -> None:
    """Zeros make them one, with the scale of the keys' own size; heads are stored once for a group."""
    of_keys, of_values = SIZES[sizes]
    q, k, v = drawn((2, 4, 5, of_keys), (2, 2, 5, of_keys), (2, 2, 5, of_values))
    hidden = torch.ones(5, 5, dtype=torch.bool).tril()
    hidden[:2] = False

    def attend(q: Tensor, *kv: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 5, -1) for x in kv[:2])
        mask = kv[2] if len(kv) > 2 else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

    for more in ((), (hidden,)):
        module, ops = normal(attend, q, k, v, *more, sizes="fake")
        assert (aten.constant_pad_nd.default in ops) == (of_keys != of_values)
        (attention,) = module.graph.find_nodes(
            op="call_function", target=aten.scaled_dot_product_attention.default
        )
        shapes = [tuple(n.meta["val"].shape) for n in attention.args[:3]]
        assert shapes == [(2, n, 5, max(of_keys, of_values)) for n in (4, 2, 2)]
        torch.testing.assert_close(module(q, k, v, *more), attend(q, k, v, *more))


@pytest.mark.parametrize("what", ["numbers in a mask", "half precision on a CPU", "dropout", "three dims"])
def test_heads_of_two_sizes_that_stay(what: str) -> None:
    q, k, v = drawn((2, 4, 5, 6), (2, 4, 5, 6), (2, 4, 5, 4))
    mask = torch.zeros(5, 5, dtype=torch.float64) if what == "numbers in a mask" else None
    if what == "half precision on a CPU":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if what == "three dims":
        q, k, v = q[0], k[0], v[0]
    rate = 0.5 if what == "dropout" else 0.0
    given = (q, k, v) if mask is None else (q, k, v, mask)
    _, ops = normal(lambda *x: F.scaled_dot_product_attention(*x, dropout_p=rate), *given, sizes="fake")
    assert aten.constant_pad_nd.default not in ops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.bfloat16).min])
def test_sinks(dtype: torch.dtype, count: int, hidden: float) -> None:
    scores, sinks = (x.to(dtype) for x in drawn((2, 3, 7, 7), (3, count)))
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), hidden)
    sinks[1] = hidden  # a head that has none
    scores[1, :, 4] = hidden  # a row that sees nothing

    def weights(s: Tensor, k: Tensor) -> Tensor:
        wide = k.reshape(1, 3, 1, count).expand(s.shape[0], -1, s.shape[2], -1)
        joined = torch.cat([s, wide], -1)
        joined = joined - joined.max(-1, keepdim=True).values
        return joined.softmax(-1)[..., :-count]

    module, ops = normal(weights, scores, sinks)
    assert aten.cat.default not in ops and aten.logsumexp.default in ops
    found = []
    for function in (weights, module):
        given = [x.clone().requires_grad_() for x in (scores, sinks)]
        value = function(*given)
        (value * torch.linspace(0, 1, value.numel()).view(value.shape)).sum().backward()
        found.append((value, *(x.grad for x in given)))
    loose = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[1][0], found[0][0], equal_nan=True, **loose)
    for got, want in zip(found[1][1:], found[0][1:], strict=True):
        known = want.isfinite()
        torch.testing.assert_close(got[known], want[known], **loose)


def weight_of_three() -> Tensor:
    """(6, 4, 3): its sizes are numbers, as those of parameters are."""
    return torch.linspace(-1, 1, 72, dtype=torch.float64).view(6, 4, 3)


def convolved(function: Callable[..., Tensor]) -> tuple[GraphModule, set[Any], Tensor]:
    (given,) = drawn((2, 4, 9))
    return *normal(lambda x: function(x, weight_of_three()), given), given


@pytest.mark.parametrize(
    "function",
    [
        lambda s, k: torch.cat([s, k.expand(2, 3, 7, 4)], -1).softmax(-1)[..., :7],
        lambda s, k: torch.cat([s, s * k], -1).softmax(-1)[..., ::2],
        lambda s, k: torch.cat([s, s * k], -1).softmax(-1)[..., 7:],
        lambda s, k: torch.cat([s, s * k], -1).softmax(-2)[..., :7],
        lambda s, k: torch.cat([s, s * k, k.expand(2, 3, 7, 1)], -1).softmax(-1)[..., :7],
        lambda s, k: torch.cat([s, s * k], -2).softmax(-1)[..., :7],
        lambda s, k: (c := torch.cat([s, s * k], -1)).sub(c.amax(-2, keepdim=True)).softmax(-1)[..., :7],
    ],
)
def test_what_looks_like_sinks(function: Callable[..., Tensor]) -> None:
    given = drawn((2, 3, 7, 7), (1, 3, 1, 1))
    torch.testing.assert_close(normal(function, *given)[0](*given), function(*given))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv1d(x, w, padding=2)[..., : x.shape[2]],
        lambda x, w: F.conv1d(x, w, padding=4, dilation=2)[:, :, :-4],
        lambda x, w: F.conv1d(F.pad(x, (2, 0)), w),
        lambda x, w: F.conv1d(x, w[..., :1]),
    ],
)
def test_causal_convolutions(function: Callable[..., Tensor]) -> None:
    module, ops, given = convolved(function)
    assert torch.ops.streambp_fx.causal_conv1d.default in ops
    torch.testing.assert_close(module(given), function(given, weight_of_three()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv1d(x, w, padding=1),
        lambda x, w: F.conv1d(x, w, padding=2)[..., 1 : x.shape[2] + 1],
        lambda x, w: F.conv1d(x, w, padding=2, stride=2)[..., :4],
        lambda x, w: F.conv1d(torch.cat([x, x], 2)[..., :12], w, padding=2)[..., ::2],
        lambda x, w: F.conv1d(F.pad(x, (0, 2)), w),
        lambda x, w: F.conv1d(F.pad(x, (2, 0), value=1.0), w),
    ],
)
def test_other_convolutions_stay(function: Callable[..., Tensor]) -> None:
    module, ops, given = convolved(function)
    assert torch.ops.streambp_fx.causal_conv1d.default not in ops
    torch.testing.assert_close(module(given), function(given, weight_of_three()))


@pytest.mark.parametrize("order", [(0, 2, 3), (3, 2, 0), (2, 0, 3)])
def test_parts_that_are_written_side_by_side_are_joined(order: tuple[int, ...]) -> None:
    """In any order; not where one is written over another."""
    ends = {0: 2, 2: 3, 3: 6}

    def by_parts(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for start in order:
            part = x[..., start : ends[start]] * (start + 1)
            made = torch.slice_scatter(made, part, 2, start, ends[start])
        return made

    def over_one_another(x: Tensor) -> Tensor:
        return torch.slice_scatter(by_parts(x), x[..., 1:4], 2, 1, 4)

    (x,) = drawn((2, 5, 6))
    module, ops = normal(by_parts, x, sizes="fake")
    assert aten.cat.default in ops and aten.slice_scatter.default not in ops
    assert module(x).equal(by_parts(x))
    module, ops = normal(over_one_another, x, sizes="fake")
    assert aten.slice_scatter.default in ops and module(x).equal(over_one_another(x))


def test_what_is_written_into_is_made_like_a_value_of_its_shape() -> None:
    def function(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return torch.full((x.shape[0] * x.shape[1], x.shape[2]), 2.0).index_add(
            0, torch.tensor([1, 1]), flat[:2]
        )

    (given,) = drawn((2, 5, 3))
    given = given.float()
    module, ops = normal(function, given)
    assert aten.full_like.default in ops and aten.full.default not in ops
    torch.testing.assert_close(module(given), function(given))


MASKED = {  # x, mask, value, dims of x before the mask
    "places": ((2, 5, 4), (2, 5, 4), (), 0), "rows": ((2, 5, 4), (2, 5), (), 0),
    "a row for each": ((2, 5, 4), (2, 5), (4,), 0), "a row of one": ((2, 5, 4), (2, 5), (1, 4), 0),
    "columns": ((2, 5, 4), (4,), (), 2), "columns of each row": ((2, 5, 4), (4,), (2, 5, 1), 2),
    "in the middle": ((2, 3, 5, 4), (3, 5), (2, 1, 4), 1), "batch": ((2, 5, 4), (2,), (5, 4), 0),
}  # fmt: skip


def put(x: Tensor, mask: Tensor, value: Tensor, before: int) -> Tensor:
    return aten.index_put(x, [*[None] * before, mask], value)


@pytest.mark.parametrize("name", MASKED)
def test_a_value_assigned_by_a_mask(name: str) -> None:
    *shapes, before = MASKED[name]
    x, mask, value = drawn(*shapes)
    module, ops = normal(lambda x, m, v: put(x, m, v, before), x, mask > 0, value)
    assert aten.index_put.default not in ops
    for chosen in (mask > 0, mask > torch.inf, mask < torch.inf):
        given = [v.clone().requires_grad_() for v in (x, value)]
        expected = [v.clone().requires_grad_() for v in (x, value)]
        found, wanted = module(given[0], chosen, given[1]), put(expected[0], chosen, expected[1], before)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        weights = torch.linspace(0.5, 1.5, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
        for result in (found, wanted):
            (result * weights).sum().backward()
        for one, other in zip(given, expected, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_values_for_each_place_of_a_mask_stay() -> None:
    x, mask = drawn((2, 5, 4), (2, 5))
    values = torch.ones(int((mask > 0).sum()), 4, dtype=torch.float64)
    _, ops = normal(lambda x, m, v: put(x, m, v, 0), x, mask > 0, values)
    assert aten.index_put.default in ops
    _, ops = normal(lambda x, m: aten.index_put(x, [m], x.sum(), True), x, mask > 0)
    assert aten.index_put.default in ops
    number = torch.arange(2)
    _, ops = normal(lambda x, n: aten.index_put(x, [n, n], x.sum()), x, number)
    assert aten.index_put.default in ops
    _, ops = normal(lambda x: aten.index_put(x, [x.sum() > 0], x.sum()), x)
    assert aten.index_put.default in ops, "a mask of no dims is not looked at by the op"


def test_a_number_assigned_by_a_mask_is_a_fill() -> None:
    x, mask = drawn((2, 5, 4), (2, 5))
    number = torch.tensor(-torch.inf, dtype=x.dtype)

    def assign(x: Tensor, mask: Tensor) -> Tensor:
        return put(x, mask, aten.detach(aten.lift_fresh_copy(number)), 0)

    module, ops = normal(assign, x, mask > 0)
    assert aten.masked_fill.Scalar in ops
    torch.testing.assert_close(module(x, mask > 0), assign(x, mask > 0))
