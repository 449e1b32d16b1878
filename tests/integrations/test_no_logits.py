"""Streamed trainers make no tensor of tokens times vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import CHUNK, LOSS_CHUNK, Make, build, dpo, hf, sft
from transformers import TrainerCallback

import streambp_fx
from streambp_fx.integrations import StreamBPCallback
from streambp_fx.measure.live_bytes import LiveBytes

# Wider than the tile of TRL's loss head, which is of a fixed width and on the CPU as long as the batch.
WIDE = 70_001


class Meter(TrainerCallback):
    """Watches every tensor that is made from the second step on: the first one compiles."""

    def __init__(self) -> None:
        self.meter: LiveBytes | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.meter = LiveBytes(model.parameters())
            self.meter.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and self.meter is not None:
            self.meter.__exit__(None, None, None)


def wide(
    make: Make, folder: Path, how: Callable[[Any], Any], callback: TrainerCallback | None = None
) -> tuple[int, int]:
    """Elements of the widest tensor of a step, and tokens times vocabulary of the smallest batch."""
    torch._dynamo.reset()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = how(build(vocab_size=WIDE, num_hidden_layers=1, **small))
    # a reference model runs in the step as it is, with TRL's tile
    before = {"precompute_ref_log_probs": True} if make is dpo else {}
    trainer, meter = make(model, folder, max_steps=2, per_device_train_batch_size=2, **before), Meter()
    if callback is not None:
        trainer.add_callback(callback)
    trainer.add_callback(meter)
    collate, tokens = trainer.data_collator, []

    def counted(rows: Any) -> Any:
        batch = collate(rows)
        tokens.append(batch["input_ids"].numel())
        return batch

    trainer.data_collator = counted
    trainer.train()
    assert meter.meter is not None
    return meter.meter.widest, min(tokens) * WIDE


@pytest.mark.slow
@pytest.mark.parametrize("make", [hf, sft, dpo], ids=lambda f: f.__name__)
def test_no_logits(make: Make, tmp_path: Path) -> None:
    def streamed(model: Any) -> Any:
        return streambp_fx.transform(model, chunk=CHUNK, loss_chunk=LOSS_CHUNK)

    widest, logits = wide(make, tmp_path, streamed)
    assert 0 < widest < logits
    if make is not hf:
        within = wide(make, tmp_path, lambda model: model, StreamBPCallback(CHUNK, loss_chunk=LOSS_CHUNK))[0]
        batch = 4 if make is dpo else 2
        assert within <= batch * LOSS_CHUNK * WIDE < widest, "TRL's tile is as wide as its batch is long"
    else:
        assert wide(make, tmp_path, lambda model: model)[0] >= logits, "the meter sees them"
