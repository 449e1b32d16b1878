"""Peak of live tensor bytes: linear in T, far below eager, and nothing as wide as T x T or T x V."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from e2e_check import transform
from e2e_memory import LiveBytes, measure
from e2e_models import build, sample

from streambp_fx.runtime.segments.segment_runner import SegmentRunner

WIDE_VOCAB, CHUNK, LOSS_CHUNK = 512, 64, 32
# Below 512 the peak lies in the loss head, whose share does not grow: the line starts after it.
LENGTHS = (512, 1024, 1536, 2048)


# -- the meter -------------------------------------------------------------------------------------------


def test_meter_counts_what_is_alive() -> None:
    with LiveBytes() as meter:
        a = torch.zeros(1000)  # 4000
        b = a + 1  # 8000
        view = b.view(10, 100)[2:5]  # a view is free
        b.add_(1)  # in place as well
        del b
        assert meter.live == 8000, "the view keeps its storage"
        del view
        assert meter.live == 4000
        c = torch.zeros(300, dtype=torch.float64)  # 2400
        del a
    assert (meter.live, meter.peak, meter.widest) == (2400, 8000, 1000)
    assert c.numel() == 300


def test_meter_sees_the_backward_pass() -> None:
    """y = sum(exp(x)): x is not counted, exp(x) is saved, its gradient is made and then x.grad."""
    x = torch.zeros(1000, requires_grad=True)
    with LiveBytes([x]) as meter:
        loss = x.exp().sum()
        assert meter.live == 4000 + 4
        loss.backward()
        assert meter.live == 4000 + 4, "exp(x) is gone, x.grad has come"
    # exp(x) and x.grad, the gradient 1 of the loss and the loss; the expanded 1 is a view
    assert meter.peak == 2 * 4000 + 2 * 4
    x.grad = None
    assert meter.live == 4


def test_meter_counts_checkpointing() -> None:
    """Known answer: n layers of tanh keep n activations in eager, inputs only under checkpointing."""
    from torch.utils.checkpoint import checkpoint

    def four(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin().sin()

    x = torch.ones(1000, requires_grad=True)

    def kept(step: Any) -> int:
        with LiveBytes([x]) as meter:
            y = step(four, x)
            live = meter.live
        del y
        return live

    assert kept(lambda f, x: f(x)) == 4 * 4000  # sin(x), sin(sin(x)), ... all but x and with y
    assert kept(lambda f, x: checkpoint(f, x, use_reentrant=False)) == 4000  # y alone


# -- the streamed step -------------------------------------------------------------------------------------


CASES = {
    "llama sdpa": ("llama", "sdpa", None),
    "llama sdpa, mask of ones": ("llama", "sdpa", "ones"),
    "llama sdpa, padded": ("llama", "sdpa", "padded"),
    "llama eager": ("llama", "eager", None),
    "llama eager, padded": ("llama", "eager", "padded"),
    "mistral sdpa": ("mistral", "sdpa", None),
    "gemma3_text eager": ("gemma3_text", "eager", None),
    "bloom eager, padded": ("bloom", "eager", "padded"),
}

RUN = ("llama sdpa, padded",)


def model_of(case: str) -> Any:
    family, impl, _ = CASES[case]
    over = {} if family == "bloom" else {"max_position_embeddings": 4096}
    return build(family, impl, dtype=torch.float32, vocab_size=WIDE_VOCAB, **over)


def batch_of(case: str, length: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(length)
    ids = torch.randint(3, WIDE_VOCAB, (1, length), generator=gen)
    batch = {"input_ids": ids, "labels": ids.clone()}
    kind = CASES[case][2]
    if kind:
        batch["attention_mask"] = torch.ones_like(ids)
    if kind == "padded":
        batch["attention_mask"][:, -length // 8 :] = 0
        batch["labels"][:, -length // 8 :] = -100
    return batch


def peak_of(model: Any, batch: dict[str, torch.Tensor], compiled: bool = False) -> LiveBytes:
    """One step's meter, after a step that compiles where that has not been done."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    if not compiled:
        step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    return measure(step, known)


@pytest.mark.parametrize("case", sample(CASES, *RUN))
def test_peak_is_linear_and_small(case: str) -> None:
    streamed = transform(model_of(case), chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    meters = {t: peak_of(streamed, batch_of(case, t), t != LENGTHS[0]) for t in LENGTHS}
    peaks = {t: m.peak for t, m in meters.items()}
    slopes = [(peaks[b] - peaks[a]) / (b - a) for a, b in pairwise(LENGTHS)]
    assert min(slopes) > 0, f"a peak that does not grow is not a peak: {peaks}"
    assert max(slopes) <= 1.1 * min(slopes), f"bytes a row: {slopes}; peaks {peaks}"
    eager = peak_of(model_of(case), batch_of(case, LENGTHS[-1]), True).peak
    assert peaks[LENGTHS[-1]] * 5 < eager, f"{peaks} against eager's {eager}"
    for t in (1024, 2048):
        widest, bound = meters[t].widest, t * min(t, WIDE_VOCAB)
        assert widest < bound, f"a tensor of {widest} elements at T={t}: T*T or T*vocabulary ({bound})"


@pytest.mark.slow
def test_the_peak_is_deterministic() -> None:
    model, batch = (
        transform(model_of("llama sdpa"), chunk=CHUNK, loss_chunk=LOSS_CHUNK),
        batch_of("llama sdpa", 300),
    )
    first, second = peak_of(model, batch), peak_of(model, batch, True)
    assert (first.peak, first.widest) == (second.peak, second.widest)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(CASES, *RUN))
def test_eager_breaks_these_bounds(case: str) -> None:
    """The bounds above can be broken: eager breaks them."""
    model = model_of(case)
    meters = {t: peak_of(model, batch_of(case, t), True) for t in (512, 1024)}
    assert meters[1024].widest >= 1024 * WIDE_VOCAB
    if CASES[case][1] == "eager":
        assert meters[1024].widest >= 1024 * 1024
        assert meters[1024].peak > 2.5 * meters[512].peak


@pytest.mark.slow
def test_nothing_is_left_after_a_step() -> None:
    """After backward only the gradients are alive: no graph, no buffer waits for the next step."""
    streamed = transform(model_of("llama sdpa"), chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    batch = batch_of("llama sdpa", 512)
    peak_of(streamed, batch)
    gc.collect()
    streamed.zero_grad(set_to_none=True)
    with LiveBytes([*streamed.parameters(), *streamed.buffers(), *batch.values()]) as meter:
        loss = streamed(**batch).loss
        loss.backward()
        gc.collect()
        gradients = sum(p.grad.nbytes for p in streamed.parameters())
        assert meter.live <= gradients + 512 * 8, f"{meter.live - gradients} bytes are still alive"
    assert meter.peak > gradients


@pytest.mark.slow
def test_frozen_parameters_get_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last norm alone to be trained, no layer is differentiated and no other gradient held."""
    batch = batch_of("llama sdpa", 512)
    full = transform(model_of("llama sdpa"), chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    frozen = model_of("llama sdpa").requires_grad_(False)
    frozen.model.norm.requires_grad_(True)
    transform(frozen, chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    swept: list[str] = []
    call = SegmentRunner.call
    monkeypatch.setattr(
        SegmentRunner,
        "call",
        lambda self, kind, *a: (kind == "joint" and swept.append(self.segment.kind)) or call(self, kind, *a),
    )
    full_peak = peak_of(full, batch).peak
    assert "layer" in swept
    swept.clear()
    # at its peak, in the loss head, the full step holds the gradient of the head's weight
    assert full_peak - peak_of(frozen, batch).peak >= 0.9 * frozen.lm_head.weight.nbytes
    assert "layer" not in swept
