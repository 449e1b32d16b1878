"""Frozen quantised weights under trained adapters: streamed where their product is known to keep rows apart.

Needs the extra `quantised`: torchao (tensor subclasses, unchunked) and bitsandbytes (4 bits, streamed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from e2e_check import assert_all_chunked
from e2e_models import build, padded, plain
from torch import nn
from transformers import AutoModelForCausalLM

import streambp_fx


def adapted(model: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        targets = ["q_proj", "down_proj"]
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config).train()


def assert_same_step(unstreamed: Any, streamed: Any, batch: dict[str, Any], rtol: float = 1e-5) -> None:
    unstreamed.zero_grad()
    streamed.zero_grad()
    want = unstreamed(**batch).loss
    want.backward()
    got = streamed(**batch).loss
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, p), (_, q) in zip(unstreamed.named_parameters(), streamed.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= rtol * p.grad.norm(), name


# -- torchao ---------------------------------------------------------------------------------------------


def in_int8() -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    model = build("llama", hidden_size=64, intermediate_size=128).float().requires_grad_(False)
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    return adapted(model)


def test_weights_with_operations_of_their_own() -> None:
    """Their regions run unchunked, as without streaming, and say so."""
    unstreamed, streamed = in_int8(), in_int8()
    streambp_fx.transform(streamed, chunk=16, loss_chunk=8)
    with pytest.warns(streambp_fx.StreamBPWarning, match="which has operations of its own") as caught:
        assert_same_step(unstreamed, streamed, plain(2, 67))
    assert any("self.up_proj(x)" in str(w.message) for w in caught), "the model's line is named"
    assert_same_step(unstreamed, streamed, padded(40, "right"))
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and schedule.segments[-1].chunked, "the loss head has plain weights"


# -- bitsandbytes ----------------------------------------------------------------------------------------


def in_4_bits(folder: Path, prepared: bool = True, **over: Any) -> Any:
    """Loaded as people load it; `prepared`: a gradient comes to the inputs of the first layer as well."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    if not folder.exists():
        build("llama", hidden_size=64, intermediate_size=128).float().save_pretrained(folder)
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32, **over}
    config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model.enable_input_require_grads()
    return adapted(model)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("twice", [False, True], ids=["quantised once", "twice"])
def test_weights_in_4_bits_are_streamed(prepared: bool, twice: bool, tmp_path: Path) -> None:
    over = {"bnb_4bit_use_double_quant": twice}
    unstreamed, streamed = (in_4_bits(tmp_path / "model", prepared, **over) for _ in range(2))
    streambp_fx.transform(streamed, chunk=16, loss_chunk=8)
    for batch in (plain(2, 67), padded(40, "right"), padded(65, "left")):
        assert_same_step(unstreamed, streamed, batch)
    assert_all_chunked(streamed)
