"""What is chosen of a step for a memory that is named: it fits, where anything does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

import streambp_fx
from streambp_fx.auto_executor import AutoExecutor
from streambp_fx.choosing.step_choice import Choice, Terms
from streambp_fx.passes.graph.facts import expression
from streambp_fx.passes.s3_cut.policy import Policy

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
NARROW = {
    "hidden_size": 128,
    "head_dim": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(**SIZES),
    "windows": Gemma3TextConfig(
        **{**SIZES, "head_dim": 16},
        sliding_window=100,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
    "one key head": LlamaConfig(**{**SIZES, **NARROW}),
}


@functools.cache
def schedule(name: str, trained: str = "", **options: Any) -> streambp_fx.Schedule:
    """Of a model without weights, of which the parameters with a certain name are trained."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for own, parameter in model.named_parameters():
        parameter.requires_grad_(trained in own)
    return streambp_fx.explain(model, 2048, **{"memory": "1GiB", **options})


def executor(name: str, trained: str = "", **options: Any) -> AutoExecutor:
    """What chooses for such a model."""
    found = schedule(name, trained, **options).executor
    assert isinstance(found, AutoExecutor)
    return found


def chosen(executor: AutoExecutor, tokens: int, budget: int) -> tuple[Choice, int]:
    """A choice, with the peak in bytes."""
    terms = Terms(tokens, budget)
    found = executor.chooser.choose(terms)
    return found, executor.chooser.peak(found, terms)


def with_memory(executor: AutoExecutor, memory: int) -> AutoExecutor:
    """The same for another memory in bytes."""
    found = copy.copy(executor)
    found.options, found.choices = dataclasses.replace(executor.options, memory=memory), {}
    return found


def inputs_of(executor: AutoExecutor, tokens: int) -> list[Any]:
    """Inputs of the graph for so many tokens; nothing is computed of them."""
    facts = executor.facts
    values = {**facts.values, facts.sequence: tokens}
    given = (n.meta["val"] for n in facts.nodes if n.op == "placeholder")
    size = lambda s: int(expression(s).subs(values))  # noqa: E731
    return [
        torch.empty([size(s) for s in v.shape]) if isinstance(v, torch.Tensor) else size(v) for v in given
    ]


def least(executor: AutoExecutor, policy: Policy, tokens: int, rows: int) -> int:
    return executor.chooser.peak(Choice(policy, rows, 256), Terms(tokens))


def test_rows_of_a_short_sequence_are_those_that_fit() -> None:
    """A sequence of 500 tokens is not one chunk whatever the memory; below 512 rows the most that fit."""
    own = executor("dense")
    peaks = {rows: least(own, Policy(), 500, rows) for rows in (500, 256, 128, 64)}
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    for rows, peak in peaks.items():
        found, held = chosen(own, 500, peak)
        assert min(found.rows, 500) == rows and held <= peak and str(found.policy).startswith("store inputs")
        found, held = chosen(own, 500, peak - 1)
        assert found.rows < rows or rows == 64
    assert held > peak - 1, "nothing fits: the smallest is taken"


def test_chunks_first_is_chosen_with_few_rows() -> None:
    """One key head of eight, of which little is trained: nothing else fits, and it does not with 512 rows."""
    own = executor("one key head", "q_proj")
    first, tokens = Policy(order="chunks"), 4096
    budget = least(own, first, tokens, 64)
    others = {p: least(own, p, tokens, 64) for p in own.policies if p.order == "layers"}
    assert min(others.values()) > budget and least(own, first, tokens, 512) > budget
    found, held = chosen(own, tokens, budget)
    assert (found.policy, found.rows) == (first, 64) and held <= budget
    usual = [least(own, p, tokens, 512) for p in own.policies]
    assert chosen(own, tokens, min(usual))[0].rows >= 128


@pytest.mark.parametrize(
    ("name", "count"), [("dense", 12), *(pytest.param(n, 40, marks=pytest.mark.slow) for n in CONFIGS)]
)
def test_more_memory_is_never_more_work_and_never_exceeded(name: str, count: int) -> None:
    """At many budgets, from where inputs fit to where nothing is computed again; the chunk is open."""
    own, tokens = executor(name), 2048 if name == "windows" else 1100
    low = least(own, Policy(), tokens, 512)
    _, most = chosen(own, tokens, 2**40)
    budgets = [low + k * (most - low) // (count - 1) for k in range(count)]
    work, rows = [], set()
    for budget in budgets:
        found, peak = chosen(own, tokens, budget)
        assert peak <= budget
        rows.add(found.rows)
        cost = own.chooser.cost(found.policy)
        work.append(sum(m.flops for m in cost.timeline(cost.sizes(tokens, found.rows))))
    assert work == sorted(work, reverse=True) and work[0] > 1.1 * work[-1]
    assert len(rows) > 1 or name == "windows", "a window is computed in part: shorter chunks have less of it"


def test_an_order_that_is_named_is_kept() -> None:
    """By default either is chosen; beside a policy that is not chosen layers go first."""
    tried = {
        order: {p.order for p in executor("dense", order=order, policy="auto").policies}
        for order in ("auto", "layers", "chunks")
    }
    assert tried == {"auto": {"layers", "chunks"}, "layers": {"layers"}, "chunks": {"chunks"}}
    default, named = streambp_fx.Options(), streambp_fx.Options(memory="1GiB", order="layers")
    assert default.order == "auto" and default.stored == named.stored == Policy() and named.chooses
    held = [chosen(executor("dense", order="chunks", policy="auto"), 2048, b)[0].rows for b in (1, 2**30)]
    assert held == [64, 2048]


@pytest.mark.filterwarnings("ignore:memory=1 does not fit:streambp_fx.StreamBPWarning")
def test_the_schedule_says_what_more_memory_would_buy() -> None:
    """Also where nothing is saved, and where not even inputs are stored in chunks of usual length."""
    own, tokens = executor("dense"), 1152
    low = least(own, Policy(), tokens, 512)
    expected = {
        1: "store inputs; {} more would do to store inputs in chunks of 512 rows: {} faster (chosen)",
        low: "store inputs; {} more would spare all: {} faster (chosen)",
        low + 2**20: "of the recompute; {} more would spare all: {} faster (chosen)",
        2**40: "that spare 100% of the recompute (chosen)",
    }
    for memory, words in expected.items():
        shown = dataclasses.replace(schedule("dense"), seq_len=None)
        again = with_memory(own, memory)
        again.chosen = shown.choose
        again.choice(inputs_of(own, tokens))
        amount = re.escape(words).replace(r"\{\}", r"[\d.]+[ %]?(?:[KM]iB)?")
        assert re.search(amount, str(shown)), (words, str(shown))


@pytest.mark.parametrize("tokens", [300, pytest.param(1100, marks=pytest.mark.slow)])
def test_a_step_that_fits_is_found_and_used_for_lengths_like_it(tokens: int) -> None:
    """Little is left over for want of a choice for each length; the peak is never above the budget."""
    own = executor("dense")
    exact = least(own, Policy(), tokens, 64)
    found = with_memory(own, exact).choice(inputs_of(own, tokens))  # a warning would be an error
    assert own.chooser.peak(found, Terms(tokens)) <= exact
    budget = 3 * exact
    own, top = with_memory(own, budget), 1 << tokens.bit_length()
    used = []
    for length in range(top // 2 + 1, top + 1, 1 if top < 1000 else 3):
        peak = own.chooser.peak(own.choice(inputs_of(own, length)), Terms(length))
        assert peak <= budget, (length, peak, budget)
        used.append(peak / budget)
    assert len(own.choices) == 16
    assert sum(used) > 0.85 * len(used), "what there is is used"


@pytest.mark.slow
def test_inputs_of_some_layers_alone_are_stored_where_nothing_else_fits() -> None:
    own = executor("one key head")
    candidates = [(least(own, p, 2048, 64), p) for p in own.policies]
    assert min(candidates, key=lambda c: c[0])[1] in [Policy(every=k) for k in (2, 4, 8)]
    found, held = chosen(own, 2048, min(c[0] for c in candidates))
    assert found.policy.every > 1 and held <= min(c[0] for c in candidates)
