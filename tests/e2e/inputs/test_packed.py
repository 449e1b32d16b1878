"""Packed and ragged batches in float64: documents that share a row never see each other."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from e2e_check import RTOL, assert_all_chunked, check_exact, compare, in_double, step, transform
from e2e_models import CHUNK, VOCAB, build
from transformers import DataCollatorWithFlattening

import streambp_fx

# Borders inside chunks, on the border of one, one token before it, and a document of several chunks.
LENGTHS = (23, 9, CHUNK - 1, 1, 50, 3)
LLAMA = functools.partial(build, "llama")


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def packed(rows: list[dict[str, list[int]]], **keywords: bool) -> dict[str, Any]:
    """One row of tokens; positions start again at each document, whose first label does not count."""
    return dict(DataCollatorWithFlattening(return_tensors="pt", **keywords)(copy.deepcopy(rows)))


def ragged(left: list[int], right: list[int], length: int = 67) -> dict[str, torch.Tensor]:
    """Rows that are padded on the left, on the right, on both sides or not at all."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB, (len(left), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, (first, last) in enumerate(zip(left, right, strict=True)):
        mask[row, :first], mask[row, length - last :] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}
    return {**batch, "position_ids": positions}


def test_packed_documents_are_exact_and_apart() -> None:
    """The loss of the packed row is that of the documents, each alone."""
    rows = documents()
    batches = {"packed": packed(rows), "other borders": packed(documents(LENGTHS[::-1]))}
    _, streamed = check_exact(LLAMA, batches)
    assert_all_chunked(streamed)
    with in_double(LLAMA):
        apart = []
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            apart.append(LLAMA()(input_ids=ids, labels=ids).loss * max(0, ids.shape[1] - 1))
        apart_losses = [x for x in apart if x.isfinite()]
        count = sum(n - 1 for n in LENGTHS)
        loss, _ = step(streamed, batches["packed"])
        assert abs(sum(apart_losses) / count - loss) <= 1e-9 * loss


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_packed_documents_of_other_families(family: str, impl: str) -> None:
    check_exact(lambda: build(family, impl), {"packed": packed(documents(), return_flash_attn_kwargs=True)})


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_a_token_does_not_reach_the_next_document(impl: str) -> None:
    """Gradients of the embeddings of a document are unchanged, bit for bit, by what stands before it."""
    rows = documents((21, 30))
    with in_double(LLAMA):
        streamed = transform(build("llama", impl))
        found = []
        for first in (5, 6):
            changed = copy.deepcopy(rows)
            changed[0]["input_ids"] = [first] * 21
            changed[0]["labels"] = [-100] * 21
            batch = packed(changed)
            embedded = streamed.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
            streamed(inputs_embeds=embedded, **batch).loss.backward()
            found.append(embedded.grad)
        assert found[0][:, :21].abs().max() == 0 < found[0][:, 21:].abs().max()
        assert found[0][:, 21:].equal(found[1][:, 21:])


@pytest.mark.slow
def test_left_and_right_padding_in_one_batch() -> None:
    batches = {
        "mixed": ragged([0, 13, 0, 5], [7, 0, 0, 20]),
        "a border on a chunk's": ragged([CHUNK, 0, 2 * CHUNK, 1], [0, CHUNK, 3, 0]),
    }
    _, streamed = check_exact(LLAMA, batches)
    assert_all_chunked(streamed)


@pytest.mark.slow
def test_a_cache_joins_documents_streamed_as_unstreamed() -> None:
    """transformers keeps packed documents apart only without a cache: said, and not silently changed."""
    factory = functools.partial(build, "llama", use_cache=True)
    batch = packed(documents())
    with in_double(factory):
        eager, streamed = factory(), transform(factory())
        with pytest.warns(streambp_fx.StreamBPWarning, match="use_cache=False"):
            compare(eager, streamed, {"with a cache": batch}, RTOL[torch.float64])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(eager, streamed, {"without": {**batch, "use_cache": False}}, RTOL[torch.float64])
        losses = [float(streamed(**batch, use_cache=c).loss) for c in (True, False)]
        assert abs(losses[0] - losses[1]) > 1e-4
