"""Callbacks of the trainers themselves, and what a trainer writes, with a streamed model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Make, assert_same, build, check, dpo, hf, lora, sft, train
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
)

pytest.importorskip("trl")
pytestmark = pytest.mark.slow


def bema() -> Any:
    """Averages of the parameters, which it writes over another model."""
    from trl import BEMACallback

    return BEMACallback(update_freq=1)


def rich_progress() -> Any:
    pytest.importorskip("rich")
    from trl import RichProgressCallback

    return RichProgressCallback()


CALLBACKS: dict[str, Callable[[], Any]] = {
    "printer": PrinterCallback,
    "progress": ProgressCallback,
    "rich progress": rich_progress,
    "averages": bema,
}


def with_callback(make: Make, callback: Callable[[], Any]) -> Make:
    def made(model: Any, folder: Path, **over: Any) -> Trainer:
        trainer = make(model, folder, **over)
        trainer.add_callback(callback())
        return trainer

    return made


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback(name: str, tmp_path: Path) -> None:
    check(with_callback(sft, CALLBACKS[name]), tmp_path)


@pytest.mark.parametrize("how", ["transform", "callback"])
def test_averages_are_those_of_the_unstreamed_run(how: str, tmp_path: Path) -> None:
    """In float64 but for the loss: Adam moves a weight as far by rounding as by a large gradient."""
    states = {}
    for kind in (None, how):
        callback = bema()
        make = with_callback(sft, lambda c=callback: c)
        train(make, lambda: build().double(), tmp_path / str(kind), kind)
        states[kind] = callback.running_model.state_dict()
    assert states[how].keys() == states[None].keys()
    for key, value in states[None].items():
        torch.testing.assert_close(states[how][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["transform", "callback"])
def test_stopped_early(how: str, tmp_path: Path) -> None:
    """No step improves on the one before by 10, so both runs stop at once."""
    over = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    over |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    make = with_callback(hf, lambda: EarlyStoppingCallback(1, early_stopping_threshold=10.0))
    runs = {kind: train(make, build, tmp_path / str(kind), kind, **over) for kind in (None, how)}
    steps = {kind: run.trainer.state.global_step for kind, run in runs.items()}
    assert steps[how] == steps[None] < 5, steps
    assert_same(runs[how], runs[None])


def test_reference_kept_in_step(tmp_path: Path) -> None:
    """TRL's callback mixes the streamed model's parameters into the reference model."""
    check(dpo, tmp_path, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)


@pytest.mark.parametrize("how", ["transform", "callback"])
def test_what_a_trainer_writes(how: str, tmp_path: Path) -> None:
    """Model and card; nothing of the streaming is in the files, and nothing is pushed."""
    run = train(sft, build, tmp_path / "run", how, push_to_hub=False)
    run.trainer.save_model(str(tmp_path / "saved"))
    run.trainer.create_model_card(model_name="tiny")
    assert (tmp_path / "run" / "README.md").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, value in again.named_parameters():
        assert value.equal(run.parameters[name]), name


@pytest.mark.parametrize("how", ["transform", "callback"])
def test_an_adapter_that_a_trainer_writes(how: str, tmp_path: Path) -> None:
    from peft import PeftModel

    run = train(sft, lora, tmp_path / "run", how)
    run.trainer.save_model(str(tmp_path / "saved"))
    again = dict(PeftModel.from_pretrained(build(), tmp_path / "saved").named_parameters())
    adapters = [name for name in run.parameters if "lora_" in name]
    assert adapters and all(again[name].equal(run.parameters[name]) for name in adapters)
