"""capture: the ATen graph of a model's forward, in which nothing is changed in place, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, listed, sections, source, stages, with_batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streambp_fx.passes.graph.sources import path

aten = torch.ops.aten


def captured(function: Callable[..., Any], name: str, run: Callable[..., Stages] | None = None) -> Stages:
    """Compare the graph of a function with its golden file."""
    found = (run or (lambda f: stages(Small(f), ids())))(function)
    check_golden(sections(source(function), found.refused or _text(found)), __file__, f"capture_{name}")
    return found


def _text(found: Stages) -> str:
    facts = found.facts
    parameters = listed(sorted(path(n) for n in facts.parameters))
    notes = f"parameters: {parameters}\nchanged in place: {listed(path(n) for n in facts.written)}"
    return f"{found.programs['capture']}\n\n{notes}"


def targets(found: Stages) -> list[Any]:
    return [n.target for n in found.facts.module.graph.nodes if n.op == "call_function"]


def decoder(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    x = F.layer_norm(x, (8,), m.bias)
    q = m.heads(m.first(x))
    x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    return F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())


def test_large_ops_are_single_nodes() -> None:
    """And the sizes are symbols: the length is T wherever it occurs."""
    found = captured(decoder, "decoder")
    assert {aten.layer_norm.default, aten.scaled_dot_product_attention.default} <= set(targets(found))
    assert "[2, T, 8]" in found.programs["capture"] and "13" not in found.programs["capture"]


def changed_in_place(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).clone()
    x.select(1, 0).mul_(3)
    m.mean.add_(ids.float().mean())
    return x + m.mean


def test_changes_in_place_become_values() -> None:
    """The new value of a buffer is one more output."""
    found = captured(changed_in_place, "changed_in_place")
    assert [path(n) for n in found.facts.written] == ["mean"]
    assert not [t for t in targets(found) if t._schema.is_mutable]


def both_open(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_the_batch_size_is_a_symbol_where_it_is_open() -> None:
    found = captured(both_open, "open_batch", lambda f: with_batch(f, ids()))
    assert "ids: [B, T] int64" in found.programs["capture"]


def checkpointed(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(checkpoint(lambda x: m.first(x).relu(), x, use_reentrant=False))


def test_a_checkpointed_region_is_part_of_the_graph() -> None:
    assert aten.relu.default in targets(captured(checkpointed, "checkpointed"))


def checkpointed_change(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).clone()
    y = checkpoint(lambda x: m.first(x.mul_(2)), x, use_reentrant=False)
    return m.head(x + y)


def test_a_checkpointed_region_that_changes_what_it_is_given_is_refused() -> None:
    """Eager changes it once more when it runs the region again."""
    found = captured(checkpointed_change, "checkpointed_change")
    assert "a checkpointed region changes what it is given" in found.refused


def by_strides(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids).as_strided((2, 3), (1, 2))
    return x.sum()


def test_reading_memory_by_strides_is_refused() -> None:
    found = captured(by_strides, "strides")
    assert "reads memory by strides" in found.refused


def mapped(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(torch.vmap(torch.sin)(x))


def test_a_transform_of_functions_is_refused() -> None:
    assert captured(mapped, "transform").refused.startswith("refused by capture: ")
