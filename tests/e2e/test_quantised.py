"""Weights that are tensor subclasses: their regions run unchunked, as without streaming, and say so.

Needs the extra `quantised`.
"""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from e2e_models import build, padded, plain

import streambp_fx

torchao = pytest.importorskip("torchao.quantization")


def quantised() -> Any:
    """A model whose layers have frozen int8 weights, under trained adapters with dropout off."""
    model = build("llama", hidden_size=64, intermediate_size=128).float().requires_grad_(False)
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        targets = ["q_proj", "down_proj"]
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config).train()


def test_a_quantised_base_with_adapters() -> None:
    unstreamed, streamed = quantised(), quantised()
    streambp_fx.transform(streamed, chunk=16, loss_chunk=8)
    for batch in (plain(2, 67), padded(40, "right")):
        unstreamed.zero_grad()
        streamed.zero_grad()
        want = unstreamed(**batch).loss
        want.backward()
        if "attention_mask" not in batch:
            with pytest.warns(streambp_fx.StreamBPWarning, match="which has operations of its own") as caught:
                got = streamed(**batch).loss
            assert any("self.up_proj(x)" in str(w.message) for w in caught), "the model's line is named"
        else:
            got = streamed(**batch).loss
        got.backward()
        torch.testing.assert_close(got, want)
        for (name, p), (_, q) in zip(unstreamed.named_parameters(), streamed.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm(), name
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and schedule.segments[-1].chunked, "the loss head has plain weights"
