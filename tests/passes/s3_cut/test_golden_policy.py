"""policy: which segments keep their inputs together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, ids, listed, sections, source, stages
from torch import Tensor

from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.s3_cut.policy import Policy, candidates, groups, rows_from_outside

POLICIES = [Policy(), Policy("attention"), Policy("inputs", 2), Policy("attention", 2), Policy("inputs", 4)]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def layers(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    for _ in range(4):
        x = x + attend(m.heads(x), m.heads(m.first(x)), m.heads(x), is_causal=True)
    return F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())


def teacher(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    y = (x + attend(m.heads(x), m.heads(m.second(x)), m.heads(x), is_causal=True)).detach()
    for _ in range(2):
        x = x + attend(m.heads(x), m.heads(m.first(x)), m.heads(x), is_causal=True)
    return ((m.head(x) - m.head(y).detach()) ** 2).mean()


@functools.cache
def facts_of(function: Callable[..., Any]) -> Facts:
    return stages(Small(function), ids()).facts


def grouped(function: Callable[..., Any], policy: Policy) -> list[list[int]]:
    return [[s.index for s in group] for group in groups(facts_of(function), policy)]


def _line(function: Callable[..., Any], policy: Policy) -> str:
    found = groups(facts_of(function), policy)
    shown = (f"{[s.index for s in g]} from {listed(n.name for n in rows_from_outside(g))}" for g in found)
    return "\n    ".join([f"{policy}:", *shown])


@pytest.mark.parametrize("function", [layers, teacher])
def test_groups(function: Callable[..., Any]) -> None:
    names = lambda nodes: listed(n.name for n in nodes)  # noqa: E731
    found = facts_of(function).segments
    segments = (f"segment {s.index} ({s.kind}): {names(s.rows)} -> {names(s.outputs)}" for s in found)
    lines = [_line(function, policy) for policy in POLICIES]
    text = sections(source(function), "\n".join(segments), "\n".join(lines))
    check_golden(text, __file__, f"policy_groups_{function.__name__}")


def test_an_embedding_joins_the_first_layer_unless_that_keeps_its_attention() -> None:
    assert grouped(layers, Policy()) == [[0, 1], [2], [3], [4], [5]]
    assert grouped(layers, Policy("attention")) == [[0], [1], [2], [3], [4], [5]]
    assert grouped(layers, Policy("inputs", 2)) == [[0, 1, 2], [3, 4], [5]]


def test_a_teacher_keeps_nothing_and_is_in_no_group_with_others() -> None:
    segments = facts_of(teacher).segments
    frozen = {s.index for s in segments if s.mixings and not facts_of(teacher).trains(s)}
    assert frozen
    for policy in POLICIES:
        assert all(len(g) == 1 for g in grouped(teacher, policy) if frozen & set(g))


@pytest.mark.parametrize("place", ["none", "host"])
def test_what_is_tried(place: str) -> None:
    """From the least work to the least memory."""
    found = candidates(Policy(offload=place))
    check_golden("\n".join(map(str, found)), __file__, f"policy_tried_{place}")
    assert found[0].save == "attention" and found[-1].every == 8
