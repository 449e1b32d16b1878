"""batch: where the samples are in a segment's values, or why they are not known to be independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, sections, source, with_batch, without_places
from torch import Tensor

from streambp_fx.passes.s2_prove.independent_samples import Samples, batch, batch_size
from streambp_fx.passes.s4_trace.carried_state import find_states


def verdicts(function: Callable[..., Any], name: str, *inputs: Tensor) -> list[Samples | str]:
    """Compare what is found in each chunked segment of a function with its golden file."""
    stages = with_batch(function, *(inputs or (ids(),)))
    facts = stages.facts
    size = batch_size(facts)
    assert size is not None
    chunked = [s for s in facts.segments if s.chunked and s.rows]
    found = [batch(facts, s, size, [state.node for state in find_states(facts, s)]) for s in chunked]
    lines = [
        f"segment {s.index} ({s.kind}): {_words(stages, v)}" for s, v in zip(chunked, found, strict=True)
    ]
    text = sections(source(function), stages.programs["signatures"], "\n".join(lines))
    check_golden(text, __file__, f"batch_{name}")
    return found


def _words(stages: Stages, verdict: Samples | str) -> str:
    assert stages.words is not None
    if isinstance(verdict, str):
        return f"not independent: {without_places(verdict)}"
    words, places = stages.words, verdict.places.items()
    found = (f"{words.name(n)}: dim {p.dim}, {words.printer.size(p.inner)} of each" for n, p in places)
    return "\n    ".join(["independent", *found])


def alone(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.first(m.embed(ids)))
    x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    return F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())


def test_attention_and_loss_of_each_sample() -> None:
    """The rows of the loss hold the samples one after the other."""
    assert all(isinstance(v, Samples) for v in verdicts(alone, "alone"))


def padded(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    q, place = m.heads(m.first(m.embed(ids))), torch.arange(ids.shape[1])
    mask = (place <= place.unsqueeze(1)) & labels.bool().unsqueeze(1).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_a_mask_of_each_sample() -> None:
    assert all(isinstance(v, Samples) for v in verdicts(padded, "padded", ids(), torch.ones(2, 13)))


def attend(m: Small, x: Tensor, y: Tensor) -> Tensor:
    q = m.heads(y)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def centred(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    y = m.first(x)
    return attend(m, x, y - y.mean(0, keepdim=True))


def turned(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return attend(m, x, m.first(x).flip(0))


def counted(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return attend(m, x, m.first(x) / ids.shape[0])


@pytest.mark.parametrize("function, reason", [(centred, "mean"), (turned, "flip"), (counted, "batch size")])
def test_rows_that_are_made_of_other_samples_or_of_their_number(
    function: Callable[..., Any], reason: str
) -> None:
    (found,) = verdicts(function, function.__name__)
    assert isinstance(found, str) and reason in found
