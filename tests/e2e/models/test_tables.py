"""Tables that are read within a chunked segment: their gradient is added to the rows that were looked up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, compare, in_double, step, total_error, transform
from e2e_memory import live
from e2e_models import DEVICE, HIDDEN, VOCAB, build, padded, plain, sample
from torch import Tensor, nn

import streambp_fx

WIDE = 64


class Factored(nn.Module):
    """Wide tables of words and of their remainders, and a projection: cheaper to look up than to keep."""

    def __init__(self, words: int, padding: int | None, by_count: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(words, WIDE, padding_idx=padding, scale_grad_by_freq=by_count)
        self.other = nn.Embedding(7, WIDE, padding_idx=None if padding is None else -1)
        self.out = nn.Linear(WIDE, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids) * self.other(ids % 7).cos())


def model_of(padding: int | None, dtype: torch.dtype = torch.float64, words: int = VOCAB, **more: Any) -> Any:
    model = build("llama")
    torch.manual_seed(3)
    model.model.embed_tokens = Factored(words, padding, **more)
    return model.to(DEVICE, dtype)


BATCHES = {"T=67": plain(2, 67), "T=3": plain(2, 3), "left": padded(50, "left"), "right": padded(67, "right")}


@pytest.mark.parametrize("padding", sample([None, 0, 5]))
def test_exact(padding: int | None) -> None:
    """Words that come again within a chunk and in several; a word that is never learned."""
    with in_double(lambda: model_of(padding)):
        eager = model_of(padding)
        streamed = transform(copy.deepcopy(eager))
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed)
    text = streambp_fx.schedule(streamed).code()
    assert text.count("index_add_") >= 2 and "embedding_dense_backward" not in text


@pytest.mark.slow
def test_half_precision_is_summed_in_float32() -> None:
    eager = model_of(0, torch.bfloat16)
    exact, streamed = copy.deepcopy(eager).float(), transform(copy.deepcopy(eager))
    runs = [[step(m, b)[1] for b in BATCHES.values()] for m in (exact, eager, streamed)]
    errors = [total_error(zip(own, runs[0], strict=True)) for own in runs[1:]]
    assert errors[1] <= 1.1 * errors[0]


def test_no_chunk_holds_a_table() -> None:
    """A table of 10 MB: held once, as the gradient."""
    words = 40_000
    model = transform(model_of(None, torch.float32, words), check="never")
    step(model, plain(2, 67))
    table = words * WIDE * 4
    model.zero_grad(set_to_none=True)
    found = live(model, plain(2, 67))
    assert table < found < 1.2 * table
    cost = streambp_fx.schedule(model).cost
    assert cost.peak(cost.sizes(67)).total == pytest.approx(found, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_gradients_by_how_often_a_word_occurs() -> None:
    """How often it does in all of the batch, which no chunk knows."""
    with in_double(lambda: model_of(None, by_count=True)):
        eager = model_of(None, by_count=True)
        compare(eager, transform(copy.deepcopy(eager)), BATCHES, 1e-9, None)
