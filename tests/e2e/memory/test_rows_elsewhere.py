"""Rows between layers that lie on disk and come by chunks: exact, and never all there."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_all_chunked, assert_close_grads, check_exact, grads, in_double, pair, step
from e2e_memory import BATCHES
from e2e_models import build, plain, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx import OffloadError
from streambp_fx.passes.s4_trace import prefix_attention
from streambp_fx.passes.s6_schedule.rows_elsewhere import rows_elsewhere as values_elsewhere
from streambp_fx.runtime.segments import rows_elsewhere

ON_DISK: dict[str, Any] = {"offload": "disk", "offload_rows": True}
FAMILIES = ["llama", "gpt2", "gemma3_text", "falcon", "opt", "bloom", "falcon_alibi", "qwen3_tied"]


def elsewhere(model: Any) -> set[str]:
    """Names of the values of a model's last step that lie elsewhere, gradients among them."""
    found = streambp_fx.schedule(model)
    assert found is not None
    return {v.name for v in values_elsewhere(found.program.instructions)}


@pytest.mark.parametrize("family", sample(FAMILIES, "llama"))
def test_exact(family: str) -> None:
    """Whatever reads along the sequence, whatever is looked up, whoever shares a weight."""
    check_exact(functools.partial(build, family), BATCHES, **ON_DISK)


@pytest.mark.parametrize("family", sample(["falcon_alibi", "gemma3_text", "mistral"], "mistral"))
def test_columns_under_a_bias_are_differentiated_in_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window, or what is added to the scores, goes with the columns: a quarter of them at a time."""
    seen: list[tuple[int, int]] = []
    made = prefix_attention.differentiated

    def counted(kernel: Any, gradient: Tensor, block: Any, out: Tensor, lse: Tensor) -> Any:
        if block.bias is not None:
            seen.append((int(block.key.shape[2]), int(block.bias.shape[-1])))
        return made(kernel, gradient, block, out, lse)

    monkeypatch.setattr(prefix_attention, "differentiated", counted)
    sizes = {"sliding_window": 60} if family in ("gemma3_text", "mistral") else {}
    batches = {"T=150": plain(2, 150)}
    check_exact(functools.partial(build, family, **sizes), batches, **ON_DISK)
    assert seen and max(columns for columns, _ in seen) < 80, "a quarter of 150, and up to 48 more"
    assert all(width in (1, columns) for columns, width in seen)


OTHER_OPTIONS = [{"save": "attention"}, {"every": 2}, {"accumulate": "weights"}, {"loss_chunk": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHER_OPTIONS)
def test_exact_beside_other_options(options: dict[str, Any]) -> None:
    batches = {n: BATCHES[n] for n in ("T=67", "padded right")}
    check_exact(functools.partial(build, "llama", num_hidden_layers=3), batches, **ON_DISK, **options)


def test_all_rows_between_layers_lie_there() -> None:
    """What comes out of the embedding and out of each layer, and the gradient of each."""
    model = build("llama", num_hidden_layers=3)
    streambp_fx.transform(model, chunk=16, loss_chunk=8, **ON_DISK)
    step(model, plain(2, 40))
    assert_all_chunked(model)
    found = elsewhere(model)
    gradients = {n for n in found if "grad" in n}
    assert len(found - gradients) == 4 and len(gradients) == 5, found  # that of the last one is scaled
    text = str(streambp_fx.schedule(model).program)
    assert "wait until" not in text and "fetch" not in text, "what lies there need not go there"
    assert text.count("on disk\n") >= 4 and "rows come by chunks" in str(streambp_fx.schedule(model))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class ReturnsRows(nn.Module):
    """The rows of the second layer go to the caller as well; the third reads the first layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](self.embedding(ids))
        second = self.layers[1](first)
        fourth = self.layers[3](self.layers[2](second + first))
        return F.cross_entropy(self.head(fourth).flatten(0, 1), ids.roll(-1, 1).flatten()), second


def test_what_others_read_stays() -> None:
    """Rows that the caller is given are on the device, and so are those that two layers read."""
    torch.manual_seed(0)
    eager = ReturnsRows().double()
    model = copy.deepcopy(eager)
    options = {"chunk": 8, "loss_chunk": 8, "logits": "keep", **ON_DISK}
    call, ids = torch.compile(model, backend="streambp", options=options), torch.randint(0, 31, (2, 37))
    losses = []
    for run in (call, eager):
        loss, rows = run(ids)
        assert not rows_elsewhere.is_elsewhere(rows)
        (loss * 2 + (rows * rows).sum()).backward()
        losses.append(loss)
    assert torch.allclose(*losses, rtol=1e-12)
    assert_close_grads(grads(model), grads(eager), 1e-9)
    assert 1 <= len({n for n in elsewhere(model) if "grad" not in n}) <= 3, elsewhere(model)


@pytest.mark.slow
@pytest.mark.parametrize("scale", sample([1.0, -2.5], -2.5))
def test_loss_times_a_number_and_a_graph_that_is_kept(scale: float) -> None:
    """The gradient that the head has made is scaled where it lies."""
    factory = functools.partial(build, "llama", num_hidden_layers=2)
    eager, streamed = pair(factory, **ON_DISK)
    with in_double(factory):
        wanted, got = (step(m, plain(2, 41), scale)[1] for m in (eager, streamed))
        assert_close_grads(got, wanted, 1e-9)


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    """The files are gone with the step: after a backward, and where there is none."""
    model = build("llama")
    streambp_fx.transform(model, chunk=16, loss_chunk=8, check="never", **ON_DISK)
    loss = model(**plain(2, 40)).loss
    assert len(rows_elsewhere._files) == 3
    loss.backward()
    gc.collect()
    assert not rows_elsewhere._files
    loss = model(**plain(2, 40)).loss
    del loss
    gc.collect()
    assert not rows_elsewhere._files
    with torch.no_grad():
        model(**plain(2, 40))
    gc.collect()
    assert not rows_elsewhere._files


@pytest.mark.slow
def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is written: a page without room would end the process."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    model = build("llama")
    streambp_fx.transform(model, chunk=16, loss_chunk=8, **ON_DISK)
    monkeypatch.setattr(rows_elsewhere.os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"No space left.*TMPDIR"):
        model(**plain(2, 67)).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.undo()
    step(model, plain(2, 67))
    assert len(grads(model)) > 0 and elsewhere(model)


def test_pages_are_given_back() -> None:
    """Rows of the third dim, and of samples: what was written is there again when it is read."""
    made = rows_elsewhere.empty((3, 1000, 70), torch.float32, "disk")
    assert not made.any() and rows_elsewhere.is_elsewhere(made[1, 5:])
    expected = torch.randn(3, 1000, 70)
    for start in range(0, 1000, 300):
        rows = made.narrow(1, start, min(300, 1000 - start))
        rows_elsewhere.ask_for(rows)
        rows.copy_(expected.narrow(1, start, rows.shape[1]))
        rows_elsewhere.give_back(rows)
        rows_elsewhere.give_back(rows.transpose(0, 2))
    assert torch.equal(made, expected)
    rows_elsewhere.scale_(made, torch.tensor(-0.5))
    assert torch.equal(made, expected * -0.5)
    assert rows_elsewhere.empty((0, 3), torch.float32, "disk").shape == (0, 3)
    assert not rows_elsewhere.is_elsewhere(expected)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", sample([200, 333], 333))
def test_predicted_peak(tokens: int) -> None:
    """Less than with what is kept on disk alone, and the states of one layer count."""
    model = build("llama", dtype=torch.bfloat16, hidden_size=64, num_hidden_layers=3)
    peaks = []
    for rows in (False, True):
        found = streambp_fx.explain(model, tokens, chunk=16, loss_chunk=16, offload="disk", offload_rows=rows)
        peaks.append(found.cost.peak(found.cost.sizes(tokens)))
    all_rows = tokens * 64 * 2
    held = [sum(p.bytes.get(c, 0) for c in ("stored inputs", "hidden-state gradients")) for p in peaks]
    assert held[0] >= 2 * all_rows and held[1] == 0
    assert peaks[1].bytes["state"] == peaks[0].bytes["state"] > 0
    there = found.cost.offloaded(found.cost.sizes(tokens))
    assert there == 4 * all_rows, "of the embedding and of each layer"


@pytest.mark.slow
def test_a_prefix_is_differentiated_in_pieces() -> None:
    """A chunk's gradients of keys and values are smaller than all of them; elsewhere they are not."""
    model = build("llama", dtype=torch.bfloat16, hidden_size=64, num_hidden_layers=3)
    shares = []
    for rows in (False, True):
        found = streambp_fx.explain(model, 3000, chunk=16, loss_chunk=16, offload="disk", offload_rows=rows)
        peak = found.cost.peak(found.cost.sizes(3000)).bytes
        shares.append(peak["chunk bodies"] / peak["state"])
    assert shares[0] > 1 and shares[1] < 0.4, shares


@pytest.mark.parametrize(
    "given", [{"offload_rows": True}, {"offload": "disk", "offload_rows": 1}, {**ON_DISK, "order": "chunks"}]
)
def test_bad_options(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"offload_rows|order"):
        streambp_fx.transform(build("llama"), **given)
