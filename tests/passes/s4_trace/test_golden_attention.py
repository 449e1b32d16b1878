"""attention and kernels: blocks over the state, merged by their log-sum-exp, and which kernel takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden import check_golden
from golden_graphs import Words, sections, source
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.s4_trace import attention_kernels
from streambp_fx.passes.s4_trace.attention_kernels import CpuFlash, choose
from streambp_fx.passes.s4_trace.prefix_attention import PrefixAttention, attend, attend_plainly

aten = torch.ops.aten
# A chunk of three rows behind five columns: four query heads of size 8, and two heads of keys and values.
PREFIX, ROWS = 5, 3
NAMES = ("query", "key", "value", "more")


@pytest.fixture(autouse=True)
def _some_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def compared(function: Callable[..., Any], name: str, *shapes: tuple[int, ...], device: str = "cpu") -> Graph:
    """Compare the ops of a function of (query, key, value, more) with its golden file."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(s, dtype=dtype, device=device) for s in shapes)).graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    words = Words({}, dict(zip(inputs, NAMES, strict=False)))
    check_golden(sections(source(function), words.graph(graph, dead=False)), __file__, f"attention_{name}")
    return graph


def calls(graph: Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def heads(rows: int, count: int = 4) -> tuple[int, ...]:
    return (1, count, rows, 8)


def first_chunk(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return attend(CpuFlash(), query, key, value, None, 0, True, None)


def test_without_a_prefix_there_is_one_block() -> None:
    graph = compared(first_chunk, "first_chunk", heads(ROWS), heads(ROWS), heads(ROWS))
    assert calls(graph, CpuFlash.op) == 1 and not calls(graph, aten.logaddexp.default)


def later_chunk(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return attend(CpuFlash(), query, key, value, None, PREFIX, True, None)


def test_the_prefix_and_the_own_rows_are_merged() -> None:
    """Heads that share keys become rows of one head where all rows read alike: before the own rows."""
    shapes = heads(ROWS), heads(PREFIX + ROWS, 2), heads(PREFIX + ROWS, 2)
    graph = compared(later_chunk, "later_chunk", *shapes)
    assert calls(graph, CpuFlash.op) == 2 and calls(graph, aten.logaddexp.default) == 1
    queries = [
        tuple(n.args[0].meta["val"].shape) for n in graph.find_nodes(op="call_function", target=CpuFlash.op)
    ]
    assert queries == [heads(ROWS), heads(2 * ROWS, 2)]


def biased(query: Tensor, key: Tensor, value: Tensor, more: Tensor) -> Any:
    mask = more > 0
    kernel = choose(query, key, value, mask)
    return attend(kernel, query, key, value, kernel.bias(mask, query, key), PREFIX, False, 0.5)


def test_under_a_mask_there_is_one_block_with_a_bias() -> None:
    """Its heads stay apart, since their rows may differ in what they read."""
    shapes = heads(ROWS), heads(PREFIX + ROWS, 2), heads(PREFIX + ROWS, 2), (ROWS, PREFIX + ROWS)
    graph = compared(biased, "mask", *shapes)
    (call,) = graph.find_nodes(op="call_function", target=CpuFlash.op)
    assert call.kwargs["attn_mask"] is not None and tuple(call.args[0].meta["val"].shape) == heads(ROWS)


def backward(query: Tensor, key: Tensor, value: Tensor, more: Tensor) -> Any:
    own = [x.narrow(2, PREFIX, ROWS).clone().requires_grad_() for x in (key, value)]
    sums = [torch.zeros_like(x) for x in (key, value)]
    own_sums = [x.narrow(2, PREFIX, ROWS) for x in sums]
    query = query.detach().requires_grad_()
    states = (*own, key, value, *sums, *own_sums)
    with torch.enable_grad():
        out, _ = PrefixAttention.apply(query, *states, None, CpuFlash(), PREFIX, True, None, 1, False)
    return torch.autograd.grad(out, [query, *own], more)


def test_each_block_is_differentiated_with_the_merged_sums() -> None:
    """The gradients of keys and values are added to those of the state in place."""
    graph = compared(
        backward, "backward", heads(ROWS), heads(PREFIX + ROWS), heads(PREFIX + ROWS), heads(ROWS)
    )
    merged = graph.find_nodes(op="call_function", target=aten.logaddexp.default)
    differentiated = graph.find_nodes(op="call_function", target=CpuFlash.op_backward)
    assert len(differentiated) == 2 and {n.args[5] for n in differentiated} == set(merged)
    assert calls(graph, aten.add_.Tensor) == 5


def with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_plainly(query, key, value, None, None, lambda weights: weights * 2)


def test_with_dropout_there_is_no_kernel() -> None:
    graph = compared(with_dropout, "dropout", heads(ROWS), heads(PREFIX, 2), heads(PREFIX, 2))
    assert calls(graph, aten._softmax.default) == 1 and not calls(graph, CpuFlash.op)


def on_cuda(query: Tensor, key: Tensor, value: Tensor) -> Any:
    kernel = choose(query, key, value, None)
    return attend(kernel, query, key, value, None, PREFIX, True, None)


def test_a_later_chunk_on_a_gpu() -> None:
    shapes = heads(ROWS), heads(PREFIX + ROWS, 2), heads(PREFIX + ROWS, 2)
    graph = compared(on_cuda, "cuda", *shapes, device="cuda")
    assert calls(graph, aten._scaled_dot_product_flash_attention.default) == 2


CHOICES = [
    ("cpu", torch.float32, 8, 8, False),
    ("cpu", torch.bfloat16, 8, 8, True),
    ("cpu", torch.float32, 8, 16, False),
    ("cuda", torch.bfloat16, 64, 64, False),
    ("cuda", torch.bfloat16, 64, 64, True),
    ("cuda", torch.bfloat16, 512, 512, False),
    ("cuda", torch.bfloat16, 64, 128, False),
    ("cuda", torch.bfloat16, 60, 60, False),
    ("cuda", torch.float32, 64, 64, False),
    ("cuda", torch.float64, 64, 64, False),
    ("mps", torch.float32, 64, 64, False),
]


def test_which_kernel_takes_what() -> None:
    """None: attention goes the plain way."""
    lines, found = [f"{'device':<8}{'dtype':<10}{'heads of keys':<15}{'of values':<11}{'mask':<7}kernel"], []
    for device, dtype, size, size_of_values, masked in CHOICES:
        with FakeTensorMode():
            query, value = (
                torch.empty(1, 4, 3, d, dtype=dtype, device=device) for d in (size, size_of_values)
            )
            mask = torch.empty(3, 3, dtype=torch.bool, device=device) if masked else None
            kernel = choose(query, query, value, mask)
        found.append(type(kernel))
        name = str(dtype).removeprefix("torch.")
        shown = "-" if kernel is None else type(kernel).__name__
        lines.append(
            f"{device:<8}{name:<10}{size:<15}{size_of_values:<11}{'yes' if masked else 'no':<7}{shown}"
        )
    check_golden("\n".join(lines), __file__, "attention_kernels")
    assert found[:3] == [CpuFlash, CpuFlash, type(None)] and found[-2:] == [type(None)] * 2
    assert found[3] is attention_kernels.CudaFlash and found[4] is attention_kernels.CudaEfficient
