"""objective: may the gradient of a head come with its values, in one sweep, or are there two?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, ids, listed, part_text, sections, source, stages
from torch import Tensor

from streambp_fx.passes.graph.subgraph import Subgraph
from streambp_fx.passes.s2_prove.linear_loss import is_linear


def losses(m: Small, ids: Tensor) -> Tensor:
    """One loss a row."""
    return F.cross_entropy(m.head(m.embed(ids)).flatten(0, 1), ids.flatten(), reduction="none").view(2, -1)


def weighted_mean(m: Small, ids: Tensor) -> Tensor:
    rows = losses(m, ids)
    weights = (ids > 3).float()
    return (rows * weights).sum() / weights.sum()


def mean_and_shift(m: Small, ids: Tensor) -> Tensor:
    return (1 - losses(m, ids)).mean() * 0.5


def preference(m: Small, ids: Tensor) -> Tensor:
    first, second = losses(m, ids).sum(1).unbind()
    return -F.logsigmoid(first - second)


def perplexity(m: Small, ids: Tensor) -> Tensor:
    return losses(m, ids).mean().exp()


@pytest.mark.parametrize(
    "function, linear",
    [
        (weighted_mean, True),
        (mean_and_shift, True),
        (preference, False),
        (perplexity, False),
    ],
)
def test_sweeps(function: Callable[..., Any], linear: bool) -> None:
    stage = stages(Small(function), ids())
    facts = stage.facts
    rows, target = facts.segments[-1].outputs, facts.outputs[0]
    part = part_text(stage, Subgraph(facts, [target], set(rows)))
    found = is_linear(facts, rows, target)
    verdict = "linear in them: one sweep" if found else "not linear in them: two sweeps"
    text = sections(source(function), (f"made of the rows of {listed(rows)}", part), verdict)
    check_golden(text, __file__, f"objective_{function.__name__}")
    assert found is linear
