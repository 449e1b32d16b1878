"""Trainers that people use, unmodified: five steps streamed are five steps unstreamed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import (
    Make,
    build,
    check,
    classifier,
    dpo,
    experts,
    grpo,
    hf,
    hybrid,
    kto,
    lora,
    on_disk,
    reward,
    sft,
    sft_chat,
    sft_completion,
)
from transformers import AutoModelForCausalLM

# Trainers of TRL switch checkpointing on, and the user is told who does it now.
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing is on as well")


@pytest.mark.parametrize("make", [pytest.param(sft, marks=pytest.mark.slow), dpo], ids=lambda f: f.__name__)
def test_a_trainer(make: Make, tmp_path: Path) -> None:
    check(make, tmp_path)


@pytest.mark.slow
def test_grpo(tmp_path: Path) -> None:
    """The same completions are drawn: a streamed step takes nothing from the random state."""
    check(grpo, tmp_path, on_disk(tmp_path / "model"), beta=0.1)


@pytest.mark.slow
def test_reward_model(tmp_path: Path) -> None:
    check(reward, tmp_path, classifier)


# AdamW would divide the gradients of decays by their size, which is that of the rounding of others.
HOW: dict[Any, dict[str, Any]] = {experts: {}, hybrid: {"optim": "sgd", "learning_rate": 0.1}}
OTHERS = [(dpo, experts), (sft, experts), (sft, hybrid), (dpo, hybrid)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "family"),
    [OTHERS[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS[1:])],
    ids=lambda f: f.__name__,
)
def test_experts_and_a_recurrence(make: Make, family: Any, tmp_path: Path) -> None:
    check(make, tmp_path, functools.partial(build, make=family), **HOW[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", [experts, hybrid], ids=lambda f: f.__name__)
def test_grpo_of_another_family(family: Any, tmp_path: Path) -> None:
    build(make=family).save_pretrained(tmp_path / "model")
    factory = lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()  # noqa: E731
    check(grpo, tmp_path, factory, beta=0.1, **HOW[family])


# ---- the callback, which also streams TRL's loss head

WHOLE: list[tuple[Make, dict[str, Any]]] = [
    (dpo, {}),
    (dpo, {"loss_type": "ipo"}),
    (kto, {}),
    (sft, {"packing": True, "max_length": 64}),
    (sft, {"loss_type": "dft"}),
    (sft_chat, {}),
    (sft_completion, {}),
]


def check_from_ids_to_loss(make: Make, folder: Path, *args: Any, **over: Any) -> None:
    run = check(make, folder, *args, how="callback", **over)
    assert run.schedule is not None
    assert all(s.chunked for s in run.schedule.segments), str(run.schedule)
    # the head is in the graph; what it gives may be returned as well, and the graph is cut behind that
    inputs = [name for s in run.schedule.segments[-2:] for name in s.inputs]
    assert any("lm_head" in name or "embed_tokens" in name for name in inputs), inputs


def test_from_ids_to_loss(tmp_path: Path) -> None:
    check_from_ids_to_loss(sft, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "over"), WHOLE, ids=lambda v: getattr(v, "__name__", None) or "-".join(v))
def test_another_from_ids_to_loss(make: Make, over: dict[str, Any], tmp_path: Path) -> None:
    check_from_ids_to_loss(make, tmp_path, **over)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_policy_gradients_from_ids_to_loss(beta: float, tmp_path: Path) -> None:
    check_from_ids_to_loss(grpo, tmp_path, on_disk(tmp_path / "model"), beta=beta)


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_from_ids_to_loss(over: dict[str, Any], tmp_path: Path) -> None:
    check_from_ids_to_loss(sft, tmp_path, lambda: lora(**over))


# ---- more of the same: make test-all


@pytest.mark.slow
@pytest.mark.parametrize("make", [hf, kto], ids=lambda f: f.__name__)
def test_another_trainer(make: Make, tmp_path: Path) -> None:
    check(make, tmp_path)


@pytest.mark.slow
def test_adapter_with_itself_as_reference(tmp_path: Path) -> None:
    check(dpo, tmp_path, lora)


SFT: list[tuple[Make, dict[str, Any]]] = [
    (sft, {"packing": True, "max_length": 64}),
    (sft, {"packing": True, "packing_strategy": "wrapped", "max_length": 64}),
    (sft, {"padding_free": True, "max_length": None}),
    (sft, {"label_smoothing_factor": 0.1}),
    (sft, {"loss_type": "dft"}),
    (sft_chat, {}),
    (sft_completion, {}),
    (hf, {"label_smoothing_factor": 0.1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "over"), SFT, ids=lambda v: getattr(v, "__name__", None) or "-".join(v))
def test_supervised(make: Make, over: dict[str, Any], tmp_path: Path) -> None:
    check(make, tmp_path, **over)


@pytest.mark.slow
@pytest.mark.parametrize("over", [{"loss_type": n} for n in ("ipo", "hinge", "robust")], ids=str)
def test_preferences(over: dict[str, Any], tmp_path: Path) -> None:
    check(dpo, tmp_path, **({"label_smoothing": 0.1} if over["loss_type"] == "robust" else {}), **over)


@pytest.mark.slow
def test_preferences_with_reference_computed_before(tmp_path: Path) -> None:
    check(dpo, tmp_path, precompute_ref_log_probs=True)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_policy_gradients(loss: str, beta: float, tmp_path: Path) -> None:
    check(grpo, tmp_path, on_disk(tmp_path / "model"), beta=beta, loss_type=loss)


@pytest.mark.slow
@pytest.mark.parametrize("make", [hf, sft], ids=lambda f: f.__name__)
@pytest.mark.parametrize("over", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters(make: Make, over: dict[str, Any], tmp_path: Path) -> None:
    check(make, tmp_path, lambda: lora(**over))
