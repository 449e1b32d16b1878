"""Attention kernels: which one is chosen, and CUDA's, as programs on fake tensors and emulated on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import sympy
import torch
from e2e_check import (
    assert_all_chunked,
    assert_close_grads,
    assert_close_loss,
    check_exact,
    step,
    transform,
)
from e2e_kernels import KERNELS, cuda_ops  # noqa: F401
from e2e_models import build, padded, plain, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import streambp_fx
from streambp_fx.passes.cost.program import program_cost
from streambp_fx.passes.graph.facts import expression, tensors_of
from streambp_fx.passes.s4_trace import attention_kernels, chunk_ops, cudnn_blocks, prefix_attention
from streambp_fx.passes.s4_trace.attention_kernels import choose

HALF, FULL = torch.bfloat16, torch.float32
Chosen = "type[kernels.Kernel] | None"


@pytest.fixture(autouse=True)
def _capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine, with or without a device."""
    monkeypatch.setattr(attention_kernels, "_capability", lambda device: (8, 0))


def on_fake_device(
    device: str, dtype: torch.dtype, heads: int = 4, size: int = 16, mask: bool = False, **other: Any
) -> Chosen:
    """The kernel for queries of `heads` heads on two heads of keys; nothing is computed."""
    with FakeTensorMode():
        query = torch.empty(2, heads, other.get("rows", 5), size, dtype=dtype, device=device)
        key = torch.empty(2, 2, 7, size, dtype=other.get("key", dtype), device=device)
        value = torch.empty(2, 2, 7, other.get("value_size", size), dtype=dtype, device=device)
        rows = torch.empty(2, 1, 5, 7, dtype=torch.bool, device=device) if mask else None
        found = choose(query, key, value, rows, by_autograd=other.get("by_autograd", False))
    return None if found is None else type(found)


FLASH, EFFICIENT, CPU = (
    attention_kernels.CudaFlash,
    attention_kernels.CudaEfficient,
    attention_kernels.CpuFlash,
)
CUDNN = attention_kernels.CudaCudnn


@pytest.mark.parametrize(
    ("device", "dtype", "given", "expected"),
    [
        ("cpu", FULL, {}, CPU),
        ("cpu", torch.float64, {"mask": True}, CPU),
        ("cpu", FULL, {"value_size": 8}, None),
        ("cuda", HALF, {}, FLASH),
        ("cuda", torch.float16, {"size": 256}, FLASH),
        ("cuda", HALF, {"mask": True}, EFFICIENT),
        ("cuda", HALF, {"size": 264}, EFFICIENT),
        ("cuda", HALF, {"value_size": 8}, EFFICIENT),
        ("cuda", HALF, {"size": 12}, None),
        ("cuda", HALF, {"key": torch.float16}, None),
        ("cuda", HALF, {"heads": 3}, None),
        ("cuda", FULL, {}, EFFICIENT),
        ("cuda", FULL, {"size": 12, "mask": True}, EFFICIENT),
        ("cuda", FULL, {"size": 10}, None),
        ("cuda", torch.float64, {}, None),
        ("meta", FULL, {}, None),
    ],
)
def test_which_kernel(device: str, dtype: torch.dtype, given: dict[str, Any], expected: Chosen) -> None:
    assert on_fake_device(device, dtype, **given) is expected


def test_kernels_that_are_switched_off() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert on_fake_device("cuda", HALF) is EFFICIENT
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        assert on_fake_device("cuda", HALF) is CUDNN
        assert on_fake_device("cuda", HALF, by_autograd=True) is EFFICIENT
        assert on_fake_device("cuda", HALF, mask=True) is EFFICIENT
        assert on_fake_device("cuda", FULL) is EFFICIENT
    with sdpa_kernel([SDPBackend.MATH]):
        assert on_fake_device("cuda", HALF) is None


@pytest.mark.parametrize(
    ("version", "capability", "given", "expected"),
    [
        (91501, (9, 0), {}, CUDNN),
        (91501, (9, 0), {"value_size": 8}, None),
        (91501, (9, 0), {"size": 136}, None),
        (91501, (9, 0), {"size": 12}, None),
        (91501, (7, 5), {}, None),
        (91500, (9, 0), {}, None),  # lacks a fix for lengths that 128 does not divide
        (None, (9, 0), {}, None),
    ],
)
def test_where_cudnn_is_taken(
    version: int | None,
    capability: tuple[int, int],
    given: dict[str, Any],
    expected: Chosen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    monkeypatch.setattr(attention_kernels, "_capability", lambda device: capability)
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: version)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        assert on_fake_device("cuda", HALF, **given) is expected


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "expected"),
    [
        ((7, 5), HALF, 16, None),
        ((7, 5), torch.float16, 16, EFFICIENT),
        ((8, 6), HALF, 208, EFFICIENT),
        ((8, 6), HALF, 256, FLASH),
        ((9, 0), HALF, 208, FLASH),
        ((12, 0), HALF, 208, EFFICIENT),
    ],
)
def test_which_kernel_on_which_device(
    capability: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    expected: Chosen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_kernels, "_capability", lambda device: capability)
    assert on_fake_device("cuda", dtype, size=size) is expected


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("masked", "pieces"), [(False, 1), (False, 4), (True, 1)])
@pytest.mark.usefixtures("cuda_ops")
def test_blocks_are_one_attention(name: str, masked: bool, pieces: int) -> None:
    """Merged over a prefix, or under a mask in which a row reads nothing; against products and a softmax.

    The prefix of 30 columns is differentiated at once, or in pieces of 7, 7, 7 and 9.
    """
    kernel = KERNELS[name][-1]
    if masked and isinstance(kernel, attention_kernels.CudaFlash | attention_kernels.CudaCudnn):
        return
    torch.manual_seed(0)
    rows, prefix = 21, 30
    query = torch.randn(2, rows, 4, 8).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, rows + prefix, 8).unbind()
    mask = prefix_attention.causal_block(prefix, rows, rows + prefix, query.device)
    if masked:
        mask = (mask & (torch.rand(2, 1, rows, rows + prefix) > 0.3)).index_fill(2, torch.tensor([3]), False)
    bias = kernel.bias(mask, query, key) if masked else None
    own = [torch.zeros_like(x[:, :, prefix:]) for x in (key, value)]
    sums = [torch.zeros_like(x) for x in (key, value)]
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, mask, scale=0.3, enable_gqa=True)
    gradient = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    query.requires_grad_()
    fixed = (bias, kernel, prefix, not masked, 0.3, pieces, False)
    out, lse = prefix_attention.PrefixAttention.apply(query, *own, key, value, *sums, *sums, *fixed)
    (found,) = torch.autograd.grad(out, [query], gradient)
    assert lse.shape == query.shape[:3]
    torch.testing.assert_close(out, expected)
    for got, want in zip((found, *sums), wanted, strict=True):
        torch.testing.assert_close(got, want)


BATCHES = {"T=67": plain(2, 67), "padded": padded(67, "right", (29, 0)), "T=80": plain(1, 80)}


CASES = [(name, save) for name in KERNELS for save in ("inputs", "attention")]


@pytest.mark.parametrize(("name", "save"), sample(CASES))
@pytest.mark.usefixtures("cuda_ops")
def test_exact(name: str, save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, a chunk that does not divide the length, padding; float32, as the ops are."""
    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS[name])
    factory = functools.partial(build, "llama", dtype=FULL)
    _, streamed = check_exact(factory, BATCHES, save=save)
    assert_all_chunked(streamed)
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and schedule.check is not None and schedule.check.ok
    assert any("cuDNN" in text for text in schedule.check.left_out) == name.startswith("cudnn")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "falcon_alibi", "falcon", "opt"])
@pytest.mark.usefixtures("cuda_ops")
def test_exact_for_other_kinds_of_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, biases, one head of keys for all queries."""
    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS["flash, efficient"])
    check_exact(functools.partial(build, family, dtype=FULL), BATCHES, save="attention")


def programs_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The schedule of a model without weights, and what was traced for its layers."""
    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS.get(name, attention_kernels.KERNELS))
    with torch.device("meta"):
        model = build("llama", dtype=HALF)
    found = streambp_fx.explain(model, seq_len=1000, chunk=128, save="attention")
    str(found)
    layer = next(s for s in found.facts.segments if s.mixings)
    traces = found.cost.executor.runners[layer.index].programs.traces
    return found, sorted(
        (t for each in traces.values() for t in each), key=lambda t: len(t.module.graph.nodes)
    )


@pytest.mark.parametrize("name", sample(["flash", "cudnn", "efficient"], "flash"))
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: the kernel's ops, nothing as large as rows x columns, one program for all chunks."""
    _, expected = programs_of("cpu", monkeypatch)
    schedule, found = programs_of(name, monkeypatch)
    assert len(found) == len(expected) == 2, "one for the first chunk, one for all others"
    for traced, of_cpu, blocks in zip(found, expected, (1, 2), strict=True):
        ops = [str(n.target) for n in traced.module.graph.nodes]
        own = name == "cudnn"
        forward = f"{'streambp_fx.block' if own else f'aten._scaled_dot_product_{name}'}_attention.default"
        assert ops.count(forward) == ops.count(forward.replace("attention.", "attention_backward.")) == blocks
        assert not any("for_cpu" in op or "softmax" in op or "bmm" in op for op in ops)
        assert traced.guards.conditions() == [], "the program is for chunks of any length"
        for node in traced.module.graph.nodes:
            for value in tensors_of(node):
                size = sympy.Poly(sympy.Mul(*(1 + expression(s) for s in value.shape), sympy.Symbol("one")))
                assert size.total_degree() <= 2, f"{node} is {tuple(value.shape)}"
        cost, of_cpu_cost = (program_cost(t.module, {}) for t in (traced, of_cpu))
        assert cost.flops == of_cpu_cost.flops != 0
    assert schedule.cost.timeline(schedule.cost.sizes(1000))


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_ops")
def test_reads_that_are_differentiated_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel that takes masks and that autograd knows: never by PyTorch's own choice.

    That could be cuDNN's, which gives a row that sees nothing a mean of values.
    """
    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS["cudnn, efficient"])
    monkeypatch.setattr(chunk_ops, "_in_place", lambda run, key, value: None)
    factory = functools.partial(build, "llama", dtype=FULL)
    batches = {"left": padded(67, "left", (29, 0)), "T=67": plain(2, 67)}
    _, streamed = check_exact(factory, batches)
    assert_all_chunked(streamed)
    runners = streambp_fx.schedule(streamed).cost.executor.runners
    traces = [t for r in runners if r is not None for each in r.programs.traces.values() for t in each]
    ops = [str(n.target) for t in traces for n in t.module.graph.nodes]
    assert any("_efficient_attention_backward" in op for op in ops)
    assert not any("for_cpu_backward" in op or "cudnn_attention" in op for op in ops)


@pytest.mark.parametrize("name", sample(["flash", "cudnn", "efficient"]))
@pytest.mark.usefixtures("cuda_ops")
def test_printed_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as a module of its own gives the same loss and gradients."""
    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS[name])
    model = transform(build("llama", dtype=FULL), save="attention")
    batch = padded(67, "right", (29, 0))
    loss, wanted = step(model, batch)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    namespace: dict[str, Any] = {}
    code = schedule.code()
    assert ("import streambp_fx" in code) == (name == "cudnn")
    exec(compile(code, "printed.py", "exec"), namespace)
    weights = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    got, found = namespace["step"](**batch, parameters=weights, buffers=buffers)
    assert_close_loss(got, loss, 1e-6)
    assert_close_grads({n: found.get(n) for n in wanted}, wanted, 1e-6)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
@pytest.mark.usefixtures("cuda_ops")
def test_backward_takes_any_layout(name: str) -> None:
    """What was kept may come back in another layout than it was made in."""
    (kernel,) = KERNELS[name]
    torch.manual_seed(0)
    query, key, value, gradient = torch.randn(4, 2, 4, 21, 8).unbind()
    block = attention_kernels.AttentionBlock(query, key, value)
    out, lse = kernel.forward(block)
    expected = kernel.backward(gradient, block, out, lse)
    for dims in ((0, 1), (0, 2), (1, 2)):
        other = [x.transpose(*dims).contiguous().transpose(*dims) for x in (gradient, out, lse)]
        assert not other[2].is_contiguous()
        torch.testing.assert_close(kernel.backward(other[0], block, *other[1:]), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_ops")
def test_blocks_that_cudnn_does_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows and columns when the op runs: the rest of a sequence, and one row on one column."""
    calls: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    asked = cudnn_blocks.for_cudnn

    def for_cudnn(query: torch.Tensor, key: torch.Tensor) -> bool:
        found = asked(query, key)
        calls[found].add((query.shape[2], key.shape[2]))
        return found

    monkeypatch.setattr(attention_kernels, "KERNELS", KERNELS["cudnn"])
    rows = 13  # 65 rows in chunks of at most 16, as even as can be; 67 have chunks of 13 and of 14
    monkeypatch.setattr(cudnn_blocks, "MULTIPLE", rows)
    monkeypatch.setattr(cudnn_blocks, "for_cudnn", for_cudnn)
    check_exact(functools.partial(build, "llama", dtype=FULL), {"T=65": plain(2, 65), "T=67": plain(1, 67)})
    stacked = 2 * rows  # of the two heads of a group
    assert calls[True] >= {(rows, rows), *((stacked, rows * k) for k in range(1, 5))}
    assert all(n % rows == 0 for pair in calls[True] for n in pair)
    assert {(14, 14), (28, 14)} <= calls[False]


def test_cudnn_where_pytorch_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_cudnn_is_preferred", lambda device: True)
    assert on_fake_device("cuda", HALF) is CUDNN
    assert on_fake_device("cuda", HALF, mask=True) is EFFICIENT
    assert on_fake_device("cuda", HALF, size=256) is FLASH
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: 91400)
    assert on_fake_device("cuda", HALF) is FLASH


@pytest.mark.parametrize(("dtype", "name"), [(HALF, "flash"), (FULL, "efficient")])
def test_forward_on_a_fake_device(dtype: torch.dtype, name: str) -> None:
    """The backward on one needs a PyTorch that is built for CUDA: autograd asks for the device."""

    def forward(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = choose(query, key, key, None)
        assert kernel is not None
        return prefix_attention.attend(kernel, query, key, key, None, 11, True, None)

    with FakeTensorMode():
        query = torch.empty(2, 4, 5, 16, dtype=dtype, device="cuda")
        graph = make_fx(forward)(query, torch.empty(2, 2, 16, 16, dtype=dtype, device="cuda")).graph
    made = [n for n in graph.nodes if n.op == "call_function"]
    assert sum(f"_scaled_dot_product_{name}_attention" in str(n.target) for n in made) == 2
    assert all(v.numel() <= 2 * 4 * 32 * 16 for n in made for v in tensors_of(n))
    out, lse = (n.meta["val"] for n in next(n for n in graph.nodes if n.op == "output").args[0])
    assert (out.shape, out.dtype, out.device) == (query.shape, dtype, query.device)
    assert (lse.shape, lse.dtype) == (query.shape[:3], FULL)
