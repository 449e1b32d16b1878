"""Functions of one element, called on all at once, give what `torch.vmap` makes of them, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from streambp_fx.passes.s1_capture.index_functions import FunctionNotUnderstood, IndexFunction, all_indices

B, H, T, S = 2, 3, 5, 7
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 3, 3, 3]])
SCORES = torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(0))
SLOPES = torch.tensor([0.5, 0.25, 0.125])
TABLE = torch.linspace(-1, 1, 40).view(2, 20)
DOUBLE, WHOLE, SMALL = (
    torch.tensor(0.1, dtype=torch.float64),
    torch.tensor(3),
    torch.tensor(200, dtype=torch.uint8),
)
BIAS = torch.linspace(0, 3, B * T * S).view(B, 1, T, S)

Function = Callable[..., Any]
MASKS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "causal": (lambda b, h, i, j: i >= j, ()),
    "window": (lambda b, h, i, j: (i >= j) & (i - j < 3), ()),
    "documents": (lambda b, h, i, j, d: d[b, i] == d[b, j], (DOCUMENTS,)),
    "documents, one index at a time": (lambda b, h, i, j, d: d[b][i] == d[b][j], (DOCUMENTS,)),
    "places moved by nothing": (lambda b, h, i, j, d: d[b, i + 0] == d[b, j - 0], (DOCUMENTS,)),
    "places moved": (lambda b, h, i, j, d: d[b, i + 1] == d[b, (j - 1).clamp(min=0)], (DOCUMENTS,)),
    "another order": (lambda b, h, i, j, d: d[j % 2, b] >= i, (DOCUMENTS,)),
    "twice the same": (lambda b, h, i, j, d: d[b, b] >= i, (DOCUMENTS,)),
    "a lookup in a lookup": (lambda b, h, i, j, d: d[0, d[b, i]] == d[1, d[b, j]], (DOCUMENTS,)),
    "bytes": (lambda b, h, i, j, d, s: d[b, i] - d[b, j] + s > 199, (DOCUMENTS.to(torch.uint8), SMALL)),
    "a truth and nothing": (lambda b, h, i, j: ((i >= j) + 0) * 2 > h, ()),
    "a square": (lambda b, h, i, j, m: m[i, j], (torch.ones(9, 9, dtype=torch.bool).tril(),)),
    "by head": (lambda b, h, i, j: i - j < h * 2 + b, ()),
    "a number": (lambda b, h, i, j, w: i - j < w, (WHOLE,)),
    "one of all heads": (lambda b, h, i, j: (h == 1) | (i == j), ()),
}
SCORE_FUNCTIONS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "capped": (lambda s, b, h, i, j: 5 * torch.tanh(s / 5), ()),
    "by distance": (lambda s, b, h, i, j, m: s - m[h] * (i - j), (SLOPES,)),
    "half a place": (lambda s, b, h, i, j: s + (i - j) / 2, ()),
    "a double": (lambda s, b, h, i, j, d: s * d, (DOUBLE,)),
    "a double of its own": (lambda s, b, h, i, j, d: torch.where(s > d, s, 0.0), (DOUBLE,)),
    "a whole number": (lambda s, b, h, i, j, n: s * n + n // 2, (WHOLE,)),
    "negative places": (lambda s, b, h, i, j, t: s + t[h % 2, i - j], (TABLE,)),
    "a row of a table": (lambda s, b, h, i, j, t: s + t[1][i], (TABLE,)),
    "all in order": (lambda s, b, h, i, j, x: s + x[b, 0, i, j], (BIAS,)),
    "in order, one by one": (lambda s, b, h, i, j, x: s + x[b][0][i][j], (BIAS,)),
    "the last": (lambda s, b, h, i, j, t: s + t[-1, -2], (TABLE,)),
    "minus infinity": (lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")), ()),
    "cast": (lambda s, b, h, i, j: (s.double() * 3).float() + i.to(torch.int8), ()),
    "of the table alone": (lambda s, b, h, i, j, t: s + (t @ t[0])[b] * t.sum(), (TABLE,)),
    "without the score": (lambda s, b, h, i, j: torch.zeros_like(s) - i, ()),
}  # fmt: skip
REFUSED: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "a sum": (lambda s, b, h, i, j, t: s + (t[0] * i).sum(), (TABLE,)),
    "a part of a table": (lambda s, b, h, i, j, t: s + t[b].amax(), (TABLE,)),
    "a table as it is": (lambda s, b, h, i, j, t: (s + t).sum(), (TABLE,)),
    "random numbers": (lambda s, b, h, i, j: s + torch.bernoulli(s.sigmoid()), ()),
    "random numbers like the score": (lambda s, b, h, i, j: s + torch.rand_like(s), ()),
    "a change": (lambda s, b, h, i, j: s.add_(1), ()),
    "a change of what is captured": (lambda s, b, h, i, j, t: s + t.mul_(2)[b, i], (TABLE,)),
    "places from truth": (lambda s, b, h, i, j, t: s + t[i > j].sum(), (TABLE,)),
    "a new tensor": (lambda s, b, h, i, j: s + s.new_zeros(3).sum(), ()),
}  # fmt: skip


def function_of(function: Function, captured: tuple[Tensor, ...], scores: bool) -> IndexFunction:
    dtype = SCORES.dtype if scores else None
    return IndexFunction(symbolic_trace(function), dtype, SCORES.device, captured)


@pytest.mark.parametrize("name", [*MASKS, *SCORE_FUNCTIONS])
def test_same_as_vmap(name: str) -> None:
    scores = name in SCORE_FUNCTIONS
    function, captured = (SCORE_FUNCTIONS if scores else MASKS)[name]
    given = (SCORES,) if scores else ()
    found = function_of(function, captured, scores).over(*given, *all_indices((B, H, T, S), SCORES.device))
    with torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex():
        prefix, suffix = (0,) * scores, (None,) * len(captured)
        call = _vmap_for_bhqkv(function, prefix=prefix, suffix=suffix)
        wanted = call(*given, *map(torch.arange, (B, H, T, S)), *captured)
    assert found.dtype == wanted.dtype
    assert torch.equal(found.expand(wanted.shape), wanted)


def test_in_order_is_a_view() -> None:
    function = function_of(SCORE_FUNCTIONS["all in order"][0], (BIAS,), True)
    assert function.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    seen: list[Any] = []

    class Ops(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Ops():
        function.over(SCORES, *all_indices((B, H, T, S), SCORES.device))
    assert torch.ops.aten.index.Tensor not in seen


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, captured = REFUSED[name]
    with pytest.raises(FunctionNotUnderstood):
        function_of(function, tuple(map(torch.clone, captured)), True).over(
            SCORES, *all_indices((B, H, T, S), SCORES.device)
        )
