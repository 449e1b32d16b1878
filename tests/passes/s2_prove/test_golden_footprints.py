"""footprints: which rows a row reads, proved from the masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, sections, source, stages
from torch import Tensor

from streambp_fx.passes.graph.facts import Reach

INFINITE = float("-inf")


def proved(function: Callable[..., Any], name: str, *inputs: Tensor) -> Stages:
    """Compare what is known of masks, before the pass and after it, with the golden file of a function."""
    given = inputs or (ids(),)
    found = stages(Small(function), *given, open_dims=(1,) * len(given))
    before, after = found.masks["axes"], found.masks["footprints"]
    check_golden(
        sections(source(function), ("axes", before), ("footprints", after)), __file__, f"footprints_{name}"
    )
    return found


def reaches(found: Stages) -> list[Reach]:
    return [m.reach for m in found.facts.mixings.values()]


def causal(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_an_attention_that_says_it_is_causal() -> None:
    assert reaches(proved(causal, "causal")) == [Reach.CAUSAL]


def all_rows(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return F.scaled_dot_product_attention(q, q, q)


def test_an_attention_without_a_mask_reads_all_rows() -> None:
    assert reaches(proved(all_rows, "all_rows")) == [Reach.FULL]


def window(m: Small, ids: Tensor) -> Tensor:
    q, place = m.heads(m.embed(ids)), torch.arange(ids.shape[1])
    distance = place.unsqueeze(1) - place
    mask = (distance >= 0) & (distance < 5)
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_a_window() -> None:
    found = proved(window, "window")
    (mixing,) = found.facts.mixings.values()
    assert (mixing.reach, mixing.window) == (Reach.WINDOW, 5)


def padded(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    q, place = m.heads(m.embed(ids)), torch.arange(ids.shape[1])
    mask = (place <= place.unsqueeze(1)) & labels.bool().view(2, 1, 1, -1)
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_a_condition_on_data_beside_causality() -> None:
    """Without padding the mask is plain causal, which is asked at run time."""
    found = proved(padded, "padded", ids(), torch.ones(2, 13))
    assert reaches(found) == [Reach.CAUSAL]
    (known,) = found.facts.masks.values()
    assert known.plain_without_data and not known.plain


def one_ahead(m: Small, ids: Tensor) -> Tensor:
    q, place = m.heads(m.embed(ids)), torch.arange(ids.shape[1])
    mask = place <= place.unsqueeze(1) + 1
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_a_mask_that_lets_a_row_see_the_next_is_not_causal() -> None:
    assert reaches(proved(one_ahead, "one_ahead")) == [Reach.FULL]


def learned(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    mask = torch.zeros(ids.shape[1], ids.shape[1]).sort().values
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_nothing_is_claimed_of_a_mask_that_is_not_understood() -> None:
    found = proved(learned, "not_understood")
    assert reaches(found) == [Reach.FULL] and "not understood" in found.masks["footprints"]


def by_hand(m: Small, ids: Tensor) -> Tensor:
    q, place = m.heads(m.embed(ids)), torch.arange(ids.shape[1])
    scores = q @ q.transpose(2, 3) * 0.5
    scores = scores.masked_fill(place > place.unsqueeze(1), INFINITE)
    return scores.softmax(-1) @ q


def test_an_attention_by_hand() -> None:
    """The scores reach as far as the product with the values, since a softmax gives the rest no weight."""
    assert reaches(proved(by_hand, "by_hand")) == [Reach.CAUSAL, Reach.CAUSAL]


def scores_read(m: Small, ids: Tensor) -> Tensor:
    q, place = m.heads(m.embed(ids)), torch.arange(ids.shape[1])
    scores = q @ q.transpose(2, 3) * 0.5
    hidden = scores.masked_fill(place > place.unsqueeze(1), INFINITE)
    return hidden.softmax(-1) @ q + scores.amax(-1, keepdim=True)


def test_scores_that_something_else_reads_are_read_whole() -> None:
    found = proved(scores_read, "scores_read_elsewhere")
    assert Reach.FULL in reaches(found)
