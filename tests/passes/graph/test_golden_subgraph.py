"""extract: parts of a graph as modules of their own, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, ids, listed, part_text, sections, source, stages
from torch import Tensor
from torch.fx import Node

from streambp_fx.passes.graph.subgraph import Subgraph

aten = torch.ops.aten


def taken(
    function: Callable[..., Any], name: str, choose: Callable[[Any], tuple[list[Node], set[Node]]]
) -> Subgraph:
    """Compare a part of a function's graph with its golden file: `choose` gives outputs and inputs."""
    found = stages(Small(function), ids())
    outputs, given = choose(found.facts)
    part = Subgraph(found.facts, outputs, given)
    text = sections(
        source(function), found.programs["signatures"], ("taken out", part_text(found, part)), _notes(part)
    )
    check_golden(text, __file__, f"extract_{name}")
    return part


def _notes(part: Subgraph) -> str:
    frozen, returned = listed(part.frozen), listed(part.returned)
    return f"random: {part.random}, without gradients: {frozen}, returned: {returned}"


def with_loss(m: Small, ids: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(ids.shape[1]).float().unsqueeze(1)
    x = m.embed(ids) * place
    rows = F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), reduction="none")
    return rows.mean(), rows.detach().amax()


def test_the_epilogue() -> None:
    """What is made of the losses of rows, which are given."""
    part = taken(with_loss, "epilogue", lambda f: (f.outputs, set(f.segments[-1].outputs)))
    assert part.frozen == [1] and part.returned == [0, 1] and not part.random
    assert {n.target for n in part.module.graph.nodes if n.op == "call_function"} >= {aten.mean.default}


def test_whole_values() -> None:
    """What depends on no parameter is computed once."""
    wanted = lambda f: [n for n in f.segments[0].whole if n.op == "call_function"]  # noqa: E731
    part = taken(with_loss, "whole_values", lambda f: (wanted(f), set()))
    assert part.frozen == list(range(len(part.outputs)))


def random(m: Small, ids: Tensor) -> Tensor:
    x = F.dropout(m.embed(ids), 0.1)
    x = F.dropout(x, 0.0).flip(1)
    return m.head(x).view(-1)


def test_a_segment_that_runs_whole() -> None:
    """Dropout draws random numbers; views may copy, since nobody knows where their operands will lie."""
    part = taken(random, "segment", lambda f: (list(f.outputs), set()))
    assert part.random
    assert aten.view.default not in {n.target for n in part.module.graph.nodes}


def test_a_part_behind_what_is_random_is_not() -> None:
    given = lambda f: {n for n in f.nodes if n.target is aten.flip.default}  # noqa: E731
    part = taken(random, "part_of_a_segment", lambda f: (list(f.outputs), given(f)))
    assert not part.random and [n for n in part.inputs if n.target is aten.flip.default]
