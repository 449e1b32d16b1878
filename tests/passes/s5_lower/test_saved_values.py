"""saved_values: of all sets of values that a forward could save, the one with the least price and work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import (
    FIRST,
    LATER,
    Small,
    Words,
    ids,
    listed,
    lowered,
    needs_symbols,
    sections,
    source,
    stages,
    traced,
)
from torch import Tensor
from torch.fx import Node

from streambp_fx.passes.s5_lower.programs import SegmentPrograms
from streambp_fx.passes.s5_lower.saved_values import (
    ROWS,
    ForwardHalf,
    computed_again,
    saved_values,
)
from streambp_fx.passes.step.saving import ATTENTION, Price

pytestmark = needs_symbols
PREFIX = 4096


def layer(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    out = F.scaled_dot_product_attention(
        m.heads(m.first(x)), m.heads(x), m.heads(m.second(x)), is_causal=True
    )
    x = x + m.first(out.transpose(1, 2).flatten(2))
    return m.head(x + F.silu(m.second(x)) * m.first(x)).logsumexp(-1).sum()


def by_hand(m: Small, ids: Tensor) -> Tensor:
    """Attention as products: its weights have rows and columns, and are too many to be saved."""
    x = m.embed(ids)
    scores = m.first(x) @ m.second(x).transpose(1, 2)
    hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    x = x + scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x
    return m.head(x).logsumexp(-1).sum()


def gated(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    y = F.layer_norm(x, x.shape[-1:], m.bias)
    keys, gate = m.heads(m.second(y)), m.first(y).sigmoid()
    out = F.scaled_dot_product_attention(m.heads(y), keys, keys, is_causal=True).transpose(1, 2).flatten(2)
    return m.head(x + out * gate).logsumexp(-1).sum()


FUNCTIONS = [layer, by_hand, gated]


def programs_of(function: Callable[..., Any]) -> SegmentPrograms:
    facts = stages(Small(function), ids()).facts
    found = next(s for s in facts.segments if s.mixings)
    assert found.chunked, found.reason
    return SegmentPrograms(facts, found)


def half_of(programs: SegmentPrograms, extent: Any) -> ForwardHalf:
    return programs.forward_half(traced(programs, "joint", extent))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_saved(function: Callable[..., Any]) -> None:
    programs, lines = programs_of(function), []
    half = half_of(programs, LATER)
    names = Words(half.names)
    names.graph(half.nodes[0].graph)
    for price in (ATTENTION, Price(10**6, PREFIX), Price(300, PREFIX), Price(1, PREFIX)):
        saved = saved_values(half, price)
        again = sum(half.operations(PREFIX)[n] for n in computed_again(half, saved)) // ROWS
        lines.append(f"{price}: {listed(names.names[n] for n in saved)}; {again} operations a row are left")
    text = sections(source(function), "\n".join(lines))
    check_golden(text, __file__, f"saved_values_{function.__name__}")


@pytest.mark.parametrize("extent", [FIRST, LATER])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_other_set_costs_less(function: Callable[..., Any], extent: Any) -> None:
    half = half_of(programs_of(function), extent)
    tried = 0
    for operations_a_byte in (0.1, 2, 10, 30, 70, 200, 900, 5000):
        price = Price(operations_a_byte, PREFIX)

        again = half.operations(PREFIX)

        def cost(saved: Iterable[Node], each: float = operations_a_byte, again: Any = again) -> int:
            left = computed_again(half, saved)
            return sum(again[n] for n in left) + sum(int(each * half.bytes[n]) for n in saved)

        found, worth = saved_values(half, price), sorted(half.savable, key=half.nodes.index)
        least = cost(found)
        assert set(found) <= half.savable
        # neighbours: any one or two values more, less, or in the place of others
        for changed in itertools.chain(*(itertools.combinations(worth, k) for k in (1, 2, 3))):
            assert cost(set(found) ^ set(changed)) >= least
            tried += 1
    assert tried > 100


@pytest.mark.parametrize("function", FUNCTIONS)
def test_more_is_saved_at_a_lower_price(function: Callable[..., Any]) -> None:
    half = half_of(programs_of(function), LATER)
    again = []
    for number in (10**9, 5000, 900, 200, 70, 30, 10, 2, 0.1):
        price = Price(number, PREFIX)
        left = computed_again(half, saved_values(half, price))
        again.append(sum(half.operations(PREFIX)[n] for n in left))
    assert again == sorted(again, reverse=True) and again[0] > again[-1]


def test_programs_where_much_is_saved() -> None:
    programs, price = programs_of(layer), Price(1, PREFIX)
    symbols = [programs.facts.values.get(s, 2) for s in programs.symbols]
    numbers = [*LATER.sizes, 0, *symbols]
    found = [programs.get(kind, frozenset(), LATER, numbers, price) for kind in ("forward", "joint")]
    forward, joint = (p.module.graph for p in found)
    saved = [n for n in joint.find_nodes(op="placeholder") if n.meta.get("saved")]
    values = len(forward.output_node().args[0]) - len(programs.segment.outputs)
    assert len(saved) == values > 3
    products = [n for n in joint.nodes if "mm" in str(n.target) and "backward" not in str(n.target)]
    whole = [n for n in lowered(programs, "joint").module.graph.nodes if "mm" in str(n.target)]
    assert len(products) < len(whole)
    attention = [n for n in joint.nodes if "scaled_dot_product" in str(n.target)]
    assert attention and all("backward" in str(n.target) for n in attention)
