"""What is chosen to be saved: within each budget, more for more memory, as good as an integer program's."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

import streambp_fx
from streambp_fx.choosing.saving import Space, choose_saving
from streambp_fx.cost.step import StepCost
from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.step.saving import Saving

SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(**SIZES),
    "windows": Gemma3TextConfig(
        **{**SIZES, "head_dim": 16},
        sliding_window=100,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
}
TOKENS, CHUNK = 1000, 128


@functools.cache
def space_of(name: str) -> Space:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    cost = streambp_fx.explain(model, TOKENS, chunk=CHUNK, loss_chunk=64).cost
    return Space(cost, cost.sizes(TOKENS))


def storing(cost: StepCost, saving: Saving) -> StepCost:
    return cost.storing(Policy(saving))


def peak(space: Space, saving: Saving) -> int:
    return int(storing(space.cost, saving).peak(space.sizes).total)


def work(space: Space, saving: Saving) -> int:
    return int(sum(m.flops for m in storing(space.cost, saving).timeline(space.sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", pytest.param("windows", marks=pytest.mark.slow)])
def test_more_memory_is_never_slower_and_never_exceeded(name: str) -> None:
    space = space_of(name)
    least, most = (peak(space, space.saving(n)) for n in (0, len(space.steps)))
    assert most > 1.5 * least
    budgets = [least + k * (most - least) // 39 for k in range(40)]
    found = [choose_saving(space, budget, least) for budget in budgets]
    for budget, chosen in zip(budgets, found, strict=True):
        assert chosen.peak == peak(space, chosen.saving) <= budget
    spared = [c.spared for c in found]
    assert spared == sorted(spared) and spared[0] == 0 and spared[-1] == space.spared[-1]
    done = [work(space, found[k].saving) for k in (0, 10, 20, 39)]
    assert done == sorted(done, reverse=True) and done[0] > done[-1]
    used = [(c.peak - least) / (b - least) for c, b in zip(found[5:], budgets[5:], strict=True)]
    assert min(used) > 0.85, "what there is is used"


@pytest.mark.parametrize("name", ["dense", pytest.param("windows", marks=pytest.mark.slow)])
def test_as_good_as_an_integer_program(name: str) -> None:
    """Of all ways to go some steps further with each chunk, at most 3% of the work less is spared."""
    space = space_of(name)
    chunks: dict[tuple[int, int], list[Any]] = {}
    for step in space.steps:
        chunks.setdefault((step.segment, step.chunk), []).append(step)
    steps = [s for own in chunks.values() for s in sorted(own, key=lambda s: s.corner)]
    saved, spared = (np.array([getattr(s, n) for s in steps], dtype=float) for n in ("saved", "spared"))
    # a step of a chunk is made after the one before it
    after = np.zeros((len(steps), len(steps)))
    for k, (a, b) in enumerate(itertools.pairwise(steps)):
        if (a.segment, a.chunk) == (b.segment, b.chunk):
            after[k, k + 1], after[k, k] = 1, -1
    for share in (0.03, 0.1, 0.3, 0.6, 0.9):
        room = int(share * saved.sum())
        rules = [LinearConstraint(saved, ub=room), LinearConstraint(after, ub=0)]
        best = milp(-spared, integrality=np.ones(len(steps)), bounds=Bounds(0, 1), constraints=rules)
        assert best.success
        assert space.spared[space.count(room)] >= 0.97 * -best.fun, share


def test_what_does_not_fit_keeps_nothing_later_from_it() -> None:
    """Later steps that fit are made, but not of a chunk of which one before them is not; they spare less."""
    space, made = space_of("dense"), 0
    for count, step in enumerate(space.steps):
        later = space.later(count, step.saved - 1)
        assert sum(s.saved for s in later) < step.saved and sum(s.spared for s in later) < step.spared
        saving = space.saving(count, later)
        corners = {(s.segment, s.chunk): s.corner for s in (*space.steps[:count], *later)}
        for s in set(space.steps[count:]) - set(later):
            assert corners.get((s.segment, s.chunk), 0) < s.corner
        made += bool(later) and saving != space.saving(count)
    assert made > 5


def test_what_is_saved_is_in_words() -> None:
    space = space_of("dense")
    every, some = (str(Policy(space.saving(n))) for n in (len(space.steps), len(space.steps) // 2))
    assert "spare 100% of the recompute" in every and "more would spare all" in some
    assert str(Policy(space.saving(0))) == "store inputs"
