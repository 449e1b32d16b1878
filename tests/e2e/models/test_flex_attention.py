"""FlexAttention: its functions are read as masks and scores like any others, and models are streamed."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import transformers.integrations.flex_attention as integration
from e2e_check import (
    assert_all_chunked,
    assert_close_grads,
    assert_close_loss,
    compare,
    in_double,
    restore,
    step,
    transform,
)
from e2e_flex import HEADS, Attention, Model, attend, block_mask, causal, ids
from e2e_models import build, padded, sample
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.utils.output_capturing import _active_collector

import streambp_fx
from streambp_fx.backend import schedules_of
from streambp_fx.passes.graph.facts import Reach


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention with gradients on a CPU, for graphs alone; transformers does not compile it by itself."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)
    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: attend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*flex_attention called without")
        yield
    torch._dynamo.reset()


def attention_over(function: Any = causal, **options: Any) -> Attention:
    """Attention with a mask function (b, h, i, j, layer, ids), made in the forward."""
    mask = {k: options.pop(k) for k in ("by_sample", "heads") if k in options}

    def attention(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        bound = function if function is causal else lambda b, h, i, j: function(b, h, i, j, ids)
        return attend(q, k, v, block_mask=block_mask(ids, bound, **mask), enable_gqa=True, **options)

    return attention


def scored(function: Any, mask: Any = causal, **options: Any) -> Attention:
    """Attention with a function of scores (s, b, h, i, j, layer, ids), and a mask if one is given."""

    def attention(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        bound = lambda s, b, h, i, j: function(s, b, h, i, j, layer, ids)  # noqa: E731
        blocks = None if mask is None else block_mask(ids, mask)
        return attend(q, k, v, bound, blocks, enable_gqa=True, **options)

    return attention


# Ids below 8 stand for padding here; a document begins with one.
def document(ids: Tensor) -> Tensor:
    return (ids < 8).cumsum(1)


def packed(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    d = document(ids)
    mask = block_mask(ids, lambda b, h, i, j: (i >= j) & (d[b, i] == d[b, j]), by_sample=True)
    return attend(q, k, v, block_mask=mask, enable_gqa=True)


def windows_of_heads(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    widths = torch.tensor([3, 5, 9, 40], device=ids.device)
    mask = block_mask(ids, lambda b, h, i, j: (i >= j) & (i - j < widths[h] + b), by_sample=True, heads=HEADS)
    return attend(q, k, v, block_mask=mask, enable_gqa=True)


def alibi(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=ids.device)
    return attend(
        q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), block_mask(ids, causal), enable_gqa=True
    )


def of_rows(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    gate = q.sum(-1).sigmoid()
    return attend(q, k, v, lambda s, b, h, i, j: s * gate[b, h, i], block_mask(ids, causal), enable_gqa=True)


def square(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    later = torch.ones(64, 64, dtype=torch.bool, device=ids.device).triu(1)[: ids.shape[1], : ids.shape[1]]
    bias = torch.zeros(later.shape, dtype=q.dtype, device=ids.device).masked_fill(later, -torch.inf)
    bias = bias[None, None].expand(ids.shape[0], 1, -1, -1)
    return attend(q, k, v, lambda s, b, h, i, j: s + bias[b][0][i][j], enable_gqa=True)


def sinks(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    out, aux = attend(
        q, k, v, block_mask=block_mask(ids, causal), enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
    )
    return out * torch.sigmoid(aux.lse - layer.slopes[:, None])[..., None]


def in_place(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    k = k.clone()
    k[..., ::2].mul_(2)
    return alibi(layer, q, k, v, ids)


CASES: dict[str, tuple[Attention, Reach]] = {
    "causal": (attention_over(), Reach.CAUSAL),
    "no mask": (lambda layer, q, k, v, ids: attend(q, k, v, enable_gqa=True), Reach.FULL),
    "window": (attention_over(lambda b, h, i, j, ids: (i >= j) & (i - j < 5), scale=0.3), Reach.WINDOW),
    "chunks": (attention_over(lambda b, h, i, j, ids: (i >= j) & (i // 6 == j // 6)), Reach.WINDOW),
    "documents": (packed, Reach.CAUSAL),
    "padding, and rows that see nothing": (
        attention_over(lambda b, h, i, j, ids: (i >= j) & (ids[b, j] > 7) & (ids[b, i] > 7), by_sample=True),
        Reach.CAUSAL,
    ),
    "prefix": (attention_over(lambda b, h, i, j, ids: (i >= j) | (j < 9)), Reach.FULL),
    "the half that is later": (attention_over(lambda b, h, i, j, ids: i <= j), Reach.FULL),
    "up to a size": (attention_over(lambda b, h, i, j, ids: (i >= j) & (i + j < ids.shape[1])), Reach.CAUSAL),
    "windows of heads": (windows_of_heads, Reach.CAUSAL),
    "soft cap": (scored(lambda s, b, h, i, j, layer, ids: 3 * torch.tanh(s / 3)), Reach.CAUSAL),
    "masked by scores": (
        scored(
            lambda s, b, h, i, j, layer, ids: torch.where((i >= j) & (ids[b, j] > 7), 2 * s, -torch.inf), None
        ),
        Reach.CAUSAL,
    ),
    "masked by size": (
        scored(lambda s, b, h, i, j, layer, ids: torch.where((s > 0) | (i == j), s, -torch.inf), None),
        Reach.FULL,
    ),
    "alibi": (alibi, Reach.CAUSAL),
    "a table by distance": (
        scored(lambda s, b, h, i, j, layer, ids: s + layer.distances[h, (i - j).clamp(0, 63)]),
        Reach.CAUSAL,
    ),
    "factors that are learned": (
        scored(lambda s, b, h, i, j, layer, ids: s * layer.slopes[h]),
        Reach.CAUSAL,
    ),
    "factors of rows": (of_rows, Reach.CAUSAL),
    "a square bias": (square, Reach.CAUSAL),
    "detached": (scored(lambda s, b, h, i, j, layer, ids: s + torch.tanh(s.detach())), Reach.CAUSAL),
    "log-sum-exp": (sinks, Reach.CAUSAL),
    "changes in place": (in_place, Reach.CAUSAL),
}  # fmt: skip
DEFAULT = ("padding, and rows that see nothing", "a table by distance")


def both(attention: Attention, batches: dict[str, Any], unchunked: int = 0, **sizes: Any) -> Any:
    """Streamed and eager compared on batches; the streamed model."""
    torch.manual_seed(0)
    eager = Model(attention, **sizes).double()
    streamed = copy.deepcopy(eager)
    transform(streamed, chunk=8, loss_chunk=8)
    with warnings.catch_warnings():
        if unchunked:
            warnings.simplefilter("ignore", streambp_fx.StreamBPWarning)
        compare(eager, streamed, batches, 1e-9, unchunked)
    return streamed


LENGTHS = {"33": {"input_ids": ids(2, 33)}, "41": {"input_ids": ids(3, 41)}}


@pytest.mark.parametrize("case", sample(CASES, *DEFAULT))
def test_streamed_whole(case: str) -> None:
    attention, reach = CASES[case]
    streamed = both(attention, LENGTHS)
    assert_all_chunked(streamed, at_least=3)
    found = [s.reach for s in streambp_fx.schedule(streamed).segments if s.mixings]
    assert found == [reach]
    assert len(schedules_of(streamed)) == 1, "one program for all lengths"


@pytest.mark.slow
def test_sizes_that_are_equal() -> None:
    """The length is also that of a head, and of the batch, and that of a chunk."""
    batches = {"33": {"input_ids": ids(33, 33)}, "8": {"input_ids": ids(8, 8)}}
    assert_all_chunked(both(alibi, batches, head=33, shared=1))


def of_columns(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    bias = k.sum(-1)
    return attend(
        q, k, v, lambda s, b, h, i, j: s + bias[b, h // 2, j], block_mask(ids, causal), enable_gqa=True
    )


def test_exact_unchunked() -> None:
    """A bias with a gradient for columns."""
    both(of_columns, LENGTHS, unchunked=1)


# ---- what is not understood


def only_blocks(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    lengths = (ids.shape[1], ids.shape[1])
    return attend(
        q, k, v, block_mask=BlockMask.from_kv_blocks(one, zero, seq_lengths=lengths), enable_gqa=True
    )


def everywhere(b: Any, h: Any, i: Any, j: Any, ids: Tensor) -> Any:
    return torch.ones_like(i, dtype=torch.bool)


def without_gradients(s: Any, b: Any, h: Any, i: Any, j: Any, layer: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        factor = torch.tanh(s)
    return s * factor


def of_vectors(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    table = torch.arange(128, dtype=q.dtype, device=q.device).sin().view(64, 2)
    sums = lambda s, b, h, i, j: s + (table[i] * table[j]).sum()  # noqa: E731
    return attend(q, k, v, sums, block_mask(ids, causal), enable_gqa=True)


def reads_tables(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    mask = block_mask(ids, causal)
    return attend(q, k, v, block_mask=mask, enable_gqa=True) * mask.kv_num_blocks.sum()


REFUSED = {
    "only blocks": (only_blocks, "its blocks are the mask"),
    "the same everywhere": (attention_over(everywhere), "its blocks are the mask"),
    "without gradients": (scored(without_gradients), "_set_grad_enabled"),
    "of vectors": (of_vectors, "more than a number"),
    "reads its tables": (reads_tables, "functions are transformed"),
}


@pytest.mark.parametrize("case", sample(REFUSED, "only blocks", "without gradients"))
def test_unstreamed(case: str) -> None:
    """A model that runs as it is says why."""
    attention, reason = REFUSED[case]
    torch.manual_seed(0)
    eager = Model(attention).double()
    streamed = copy.deepcopy(eager)
    transform(streamed, chunk=8, loss_chunk=8)
    with pytest.warns(streambp_fx.StreamBPWarning, match=reason):
        compare(eager, streamed, LENGTHS, 1e-9, None)
    assert streambp_fx.schedule(streamed) is None


def test_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch refuses to differentiate it, a streamed model refuses as well."""
    monkeypatch.undo()
    streamed = Model(lambda layer, q, k, v, ids: flex_attention(q, k, v, enable_gqa=True))
    transform(streamed, chunk=8, loss_chunk=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", streambp_fx.StreamBPWarning)
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            streamed(input_ids=ids(2, 33))


# ---- block masks that are inputs


def given_mask(layer: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: BlockMask) -> Tensor:
    return attend(q, k, v, block_mask=mask, enable_gqa=True)


def with_mask(batch: int, length: int) -> dict[str, Any]:
    d = document(ids(batch, length))
    same = lambda b, h, i, j: (i >= j) & (d[b, i] == d[b, j])  # noqa: E731
    mask = create_block_mask(same, batch, None, length, length, device="cpu", BLOCK_SIZE=16)
    return {"input_ids": ids(batch, length), "mask": mask}


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_a_mask_that_is_an_input(door: str) -> None:
    """From the first call on, and by one program for all lengths, batches and numbers of blocks."""
    batches = {f"{b}, {n}": with_mask(b, n) for b, n in ((2, 33), (3, 40), (2, 57))}
    torch.manual_seed(0)
    eager = Model(given_mask, layers=2).double()
    streamed = copy.deepcopy(eager)
    call: Any = transform(streamed, chunk=8, loss_chunk=8)
    if door == "compile":
        restore(streamed)
        call = torch.compile(streamed, backend="streambp", options={"chunk": 8, "loss_chunk": 8})
    for name, batch in batches.items():
        want, grads = step(eager, batch)
        streamed.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        assert_close_loss(loss.detach(), want, 1e-9, name)
        assert_close_grads({n: p.grad for n, p in streamed.named_parameters()}, grads, 1e-9, name)
    assert_all_chunked(streamed, at_least=4)
    assert len(schedules_of(streamed)) == 1
    assert torch.compiler.config.dynamic_sources == ""


# ---- under autocast, and in models of transformers


@pytest.mark.slow
@pytest.mark.parametrize("case", ["causal", "alibi", "log-sum-exp"])
def test_autocast(case: str) -> None:
    """Operands are cast to bfloat16, and scores are float32."""
    attention, _ = CASES[case]
    batch = LENGTHS["33"]
    torch.manual_seed(0)
    model = Model(attention)
    streamed, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    transform(streamed, chunk=8, loss_chunk=8)
    want, _ = step(exact, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = step(streamed, batch)
    assert_all_chunked(streamed)
    assert abs(float(loss) - float(want)) < 1e-2
    assert all(g.dtype == torch.float32 for g in grads.values() if g is not None)
    segments = streambp_fx.schedule(streamed).segments
    names = {"dot_product_attention": torch.bfloat16, "_safe_softmax": torch.float32}
    found = [(n, d) for s in segments for n in s.nodes for name, d in names.items() if name in str(n.target)]
    assert found and all(n.args[0].meta["val"].dtype == dtype for n, dtype in found)


FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "gemma3_text", "cohere2")
BATCHES = {"right": padded(33, "right"), "left": padded(57, "left", (0, 13, 4))}


@pytest.mark.parametrize("family", sample(FAMILIES))
def test_transformers(family: str) -> None:
    with in_double(functools.partial(build, family)):
        eager = build(family, "flex_attention")
        streamed = copy.deepcopy(eager)
        transform(streamed, chunk=8, loss_chunk=8)
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed, at_least=4)
    assert not _active_collector.compiling, "another model could not record what is within it"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient checkpointing is on")
def test_checkpointed_layers() -> None:
    eager = build("llama", "flex_attention")
    streamed = copy.deepcopy(eager)
    streamed.gradient_checkpointing_enable()
    transform(streamed, chunk=8, loss_chunk=8)
    with in_double(functools.partial(build, "llama")):
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed, at_least=4)
