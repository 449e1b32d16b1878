"""The callback, and what goes on around the steps of a trainer: checkpoints, evaluation, precision."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import CHUNK, LOSS_CHUNK, VOCAB, Run, assert_same, build, check, hf, sft, train
from transformers import TrainerCallback

import streambp_fx
from streambp_fx.integrations import StreamBPCallback


def streamed_entries(run: Run) -> list[dict[str, Any]]:
    return [entry for entry in run.log if "loss" in entry]


def test_streams_while_it_trains_and_restores(tmp_path: Path) -> None:
    run = check(hf, tmp_path, how="callback")
    entries = streamed_entries(run)
    peaks = [entry["streambp/peak_bytes"] for entry in entries]
    assert len(entries) == 5 and all(entry["streambp/chunk"] == CHUNK for entry in entries)
    assert peaks == sorted(peaks) and peaks[0] > 0
    assert "forward" not in vars(run.model) and streambp_fx.schedule(run.model) is None
    assert run.model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, VOCAB)


@pytest.mark.slow
def test_below_a_forward_of_the_trainer(tmp_path: Path) -> None:
    """TRL's head is put over the model before training begins; the backbone streams all the same."""
    run = check(sft, tmp_path, how="callback")
    assert all(entry["streambp/peak_bytes"] > 0 for entry in streamed_entries(run))
    assert "forward" not in vars(run.model.model), "the backbone is restored"


class Stops(TrainerCallback):
    """Training fails when its first step begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_a_model_transformed_before_keeps_its_options(tmp_path: Path) -> None:
    model = streambp_fx.transform(build(), chunk=24, loss_chunk=LOSS_CHUNK)
    before, callback = model.forward, StreamBPCallback(chunk=CHUNK)
    trainer = hf(model, tmp_path, callbacks=[callback, Stops()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    callback.close()
    assert model.forward is before


def test_after_training_that_raised(tmp_path: Path) -> None:
    model, callback = build(), StreamBPCallback(chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    trainer = hf(model, tmp_path, callbacks=[callback, Stops()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "forward" in vars(model) and "forward" in vars(model.model)
    callback.close()
    assert "forward" not in vars(model) and "forward" not in vars(model.model)


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunks": 16}, {"logits": "some"}])
def test_wrong_options_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"chunk|logits"):
        StreamBPCallback(**wrong)


# ---- around the steps


@pytest.mark.slow
def test_checkpointing_is_taken_over(tmp_path: Path) -> None:
    """One warning, no double recompute, and the switch is as the user left it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = check(hf, tmp_path, gradient_checkpointing=True)
    own = [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]
    assert len(own) == 1 and "takes over" in own[0] and "gradient_checkpointing=False" in own[0]
    assert run.model.is_gradient_checkpointing


@pytest.mark.slow
def test_accumulation_and_clipping(tmp_path: Path) -> None:
    """`num_items_in_batch` changes with every step and compiles nothing."""
    run = check(hf, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.3)
    assert max(entry["grad_norm"] for entry in streamed_entries(run)) > 0.3, "nothing was clipped"


class Generates(TrainerCallback):
    """Generates after each step, in the middle of training."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.eval()
        ids = torch.tensor([[5, 6, 7, 8]])
        self.texts.append(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist())
        model.train()


@pytest.mark.slow
def test_evaluation_and_generation_in_between_and_the_best_model(tmp_path: Path) -> None:
    over = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    over |= {"load_best_model_at_end": True, "learning_rate": 0.03}
    drawn = {}
    runs = {}
    for how in (None, "transform"):
        drawn[how] = Generates()
        runs[how] = train(hf, build, tmp_path / str(how), how, callbacks=[drawn[how]], **over)
    assert_same(runs["transform"], runs[None])
    assert drawn["transform"].texts == drawn[None].texts and len(drawn[None].texts) == 5
    assert any("eval_loss" in entry for entry in runs["transform"].log)


@pytest.mark.slow
def test_saved_and_resumed_in_the_middle(tmp_path: Path) -> None:
    """A streamed run goes on where a streamed or an unstreamed one was saved."""
    over = {"save_strategy": "steps", "save_steps": 2}
    want = train(hf, build, tmp_path / "unstreamed", None, **over)
    train(hf, build, tmp_path / "streamed", "callback", **over)
    for folder in ("streamed", "unstreamed"):
        checkpoint = str(tmp_path / folder / "checkpoint-2")
        got = train(hf, lambda: build(seed=5), tmp_path / "again", "callback", checkpoint)
        got.log, rest = streamed_entries(got)[-3:], streamed_entries(want)[-3:]
        assert [entry["step"] for entry in rest] == [3, 4, 5]
        assert_same(got, Run(want.trainer, want.model, rest, want.parameters))


@pytest.mark.slow
def test_half_precision_is_as_near_to_float32_as_unstreamed(tmp_path: Path) -> None:
    """bf16 rounds at each op, so two orders of one sum differ; neither is farther from float32."""
    exact = train(hf, build, tmp_path / "float32", None)
    far = {}
    for how in (None, "transform", "callback"):
        run = train(hf, build, tmp_path / f"bf16 {how}", how, bf16=True)
        losses = [entry["loss"] for entry in streamed_entries(run)]
        far[how] = max(abs(a - e["loss"]) for a, e in zip(losses, streamed_entries(exact), strict=True))
    assert 0 < far[None] < 0.02, "bf16 is on"
    assert far["transform"] <= 2 * far[None] and far["callback"] <= 2 * far[None], far


# ---- another compiler, and those that read the log


@pytest.mark.slow
def test_another_compiler_around_it(tmp_path: Path) -> None:
    """`torch_compile=True`: streamed all the same, and what it logs is the same."""
    over = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    runs = {how: train(hf, build, tmp_path / str(how), how, **over) for how in (None, "callback")}
    assert_same(runs["callback"], runs[None])
    entries = streamed_entries(runs["callback"])
    assert all(entry["streambp/chunk"] == CHUNK for entry in entries) and len(entries) == 2


class Never(TrainerCallback):
    """Somebody puts the forwards of the classes back while the model trains."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.forward = types.MethodType(type(model).forward, model)
        model.model.forward = types.MethodType(type(model.model).forward, model.model)


def test_a_training_without_a_streamed_step_says_so(tmp_path: Path) -> None:
    trainer = hf(build(), tmp_path, callbacks=[StreamBPCallback(chunk=CHUNK), Never()], max_steps=1)
    with pytest.warns(streambp_fx.StreamBPWarning, match="no step of this training was streamed: "):
        trainer.train()


class Logs(TrainerCallback):
    """An integration, which keeps what it is given when it is given it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


@pytest.mark.slow
def test_integrations_see_what_it_logs(tmp_path: Path) -> None:
    """Those that `report_to` names come before the callbacks of the user: the callback goes first."""
    integration, streams = Logs(), StreamBPCallback(chunk=CHUNK, check="never")
    trainer = hf(build(), tmp_path, callbacks=[integration, streams], max_steps=1)
    trainer.train()
    assert integration.seen[0]["streambp/chunk"] == CHUNK and integration.seen[0]["streambp/peak_bytes"] > 0
    kinds = [type(c) for c in trainer.callback_handler.callbacks]
    assert kinds[0] is StreamBPCallback and kinds.count(StreamBPCallback) == 1
