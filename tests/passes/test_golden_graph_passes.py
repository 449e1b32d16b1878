"""Passes over the graph that have no golden test of their own: a bias, selected rows, layouts, segments.

And each pass has cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, ids, needs_symbols, sections, source, stages, without_places
from torch import Tensor

from streambp_fx.dynamo.branches.traced import predicate, results
from streambp_fx.passes import PASSES
from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.pipeline.log import observed, program_text

pytestmark = needs_symbols


def distance(ids: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1])
    return place[:, None] - place


def attended(m: Small, ids: Tensor, bias: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    mask = bias.masked_fill(distance(ids) < 0, float("-inf"))
    return m.head(F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2))


# ---- trained_bias


def looked_up(m: Small, ids: Tensor) -> Tensor:
    return attended(m, ids, F.embedding(distance(ids).clamp(0, 7), m.first.weight)[..., :2].permute(2, 0, 1))


def two_readers(m: Small, ids: Tensor) -> Tensor:
    bias = m.bias[distance(ids).clamp(0, 7)]
    return attended(m, ids, bias) + attended(m, ids, 2 * bias)


def not_trained(m: Small, ids: Tensor) -> Tensor:
    return attended(m, ids, -0.5 * distance(ids).float())


# ---- branches


def where_there_are_some(m: Small, ids: Tensor) -> Tensor:
    x, mask = m.embed(ids).flatten(0, 1), ids.flatten() > 4
    asked = predicate(mask.any(), False)
    (made,) = results(asked, (x.index_put((mask,), m.first(x[mask])),), (x,), 1)
    return m.head(made)


def unless_there_are_none(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).flatten(0, 1)
    at = (ids.flatten() == 3).nonzero().squeeze(1)
    asked = predicate(at.shape[0] == 0, True)
    (made,) = results(asked, (x.index_add(0, at, m.first(x[at])),), (x,), 1)
    return m.head(made)


def where_it_is_counted(m: Small, ids: Tensor) -> Tensor:
    x, made = m.embed(ids).flatten(0, 1), m.embed(ids).flatten(0, 1)
    counts = F.one_hot(ids.flatten() % 2, 2).sum(0)
    for number, layer in enumerate((m.first, m.second)):
        (at,) = torch.where(ids.flatten() % 2 == number)
        asked = predicate(counts[number] > 0, False)
        (made,) = results(asked, (made.index_add(0, at, layer(x[at])),), (made,), 1)
    return m.head(made)


# ---- row_selections


def one_expert(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).flatten(0, 1)
    (at,) = torch.where(ids.flatten() > 4)
    return m.head(x.index_add(0, at, m.first(x[at])))


def two_experts(m: Small, ids: Tensor) -> Tensor:
    x = made = m.embed(ids).flatten(0, 1)
    for expert, layer in enumerate((m.first, m.second)):
        (at,) = torch.where(ids.flatten() % 2 == expert)
        made = made.index_add(0, at, layer(x[at]).relu())
    return m.head(made)


def all_are_run(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(torch.where(ids[..., None] > 4, m.first(x), x))


# ---- axes


def causal(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return m.head(F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2))


def merged(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).flatten(0, 1)
    return F.cross_entropy(m.head(m.first(x)), ids.flatten())


def mixed(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(m.first(x - x.mean(1, keepdim=True)))


# ---- segment


def two_layers(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    for layer in (m.first, m.second):
        q = m.heads(layer(x))
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    return F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())


CASES: dict[str, tuple[Callable[..., Any], ...]] = {
    "trained_bias": (looked_up, two_readers, not_trained),
    "branches": (where_there_are_some, unless_there_are_none, where_it_is_counted),
    "row_selections": (one_expert, two_experts, all_are_run),
    "axes": (causal, merged, mixed),
    "segment": (two_layers, merged, mixed),
}
OTHERS = {"signatures": "share"}  # under another name


def found_by(function: Callable[..., Any], name: str) -> str:
    """What a pass over the graph changed, or what it has proved or cut, by lines of the program."""
    texts: dict[str, str] = {}

    def observe(of: str, made: Any, seconds: float) -> None:
        texts[of] = without_places(program_text(made)) if isinstance(made, Facts) else ""

    with observed(observe), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        own = stages(Small(function), ids())
    names = [p.name for p in PASSES]
    text = texts[name] or own.change(names[names.index(name) - 1], name)
    assert own.words is not None
    for node in (n for n in own.words.names if n.op == "placeholder"):  # Dynamo numbers inputs as it likes
        text = re.sub(rf"\b{node.name}\b", own.words.names[node], text)
    inputs = [line for line in text.splitlines() if " = inputs[" in line]
    rest = [line for line in text.splitlines() if line not in inputs]
    return re.sub(r"row_selection_\d+\(", "row_selection(", "\n".join([*sorted(inputs), *rest]))


@pytest.mark.parametrize(("name", "function"), [(n, f) for n, own in CASES.items() for f in own])
def test_what_a_pass_makes(name: str, function: Callable[..., Any]) -> None:
    check_golden(
        sections(source(function), found_by(function, name)), __file__, f"{name}_{function.__name__}"
    )


def test_every_pass_has_cases() -> None:
    folder = Path(__file__).parent / "golden"
    few = {p.name for p in PASSES if len([*folder.glob(f"{OTHERS.get(p.name, p.name)}_*.txt")]) < 3}
    assert not few
