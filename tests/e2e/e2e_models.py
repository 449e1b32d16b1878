"""Tiny, randomly initialised causal LMs of many families, and the batches the tests feed them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from streambp_fx.measure.in_float64 import true_double  # noqa: F401  (what tests of these models need)

VOCAB, HIDDEN, HEAD = 97, 32, 8
CHUNK, LOSS_CHUNK = 16, 8
#: What models and batches are made on: `STREAMBP_TEST_DEVICE=cuda make test ARGS=tests/e2e/models`.
DEVICE = torch.device(os.environ.get("STREAMBP_TEST_DEVICE", "cpu"))

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_MIXED = ["sliding_attention", "full_attention"]
_GPT2 = {
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 48,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Names a family spells in its own way: these replace the common ones.
_DROP_GPT2 = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DROP_GPT2 += ("num_key_value_heads", "max_position_embeddings")

# name -> (transformers model type, config overrides, config keys of _BASE to leave out)
_SPECS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ()),
    "qwen2": ("qwen2", {}, ()),
    "qwen3": ("qwen3", {"head_dim": HEAD}, ()),
    "gemma2": ("gemma2", {"head_dim": HEAD, "sliding_window": 16, "layer_types": _MIXED}, ()),
    "gemma3_text": ("gemma3_text", {"head_dim": HEAD, "sliding_window": 16, "layer_types": _MIXED}, ()),
    "mistral": ("mistral", {"head_dim": HEAD, "sliding_window": 16}, ()),
    "phi3": ("phi3", {"sliding_window": 16}, ()),
    "olmo2": ("olmo2", {}, ()),
    "gpt_neox": ("gpt_neox", {}, ("num_key_value_heads",)),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}, ("intermediate_size",)),
    "falcon": ("falcon", {"bias": True}, ("num_key_value_heads", "intermediate_size")),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, _DROP_GPT2[1:]),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": 16, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        (),
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}, ()),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 1.5,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
        (),
    ),
    "cohere2": ("cohere2", {"head_dim": HEAD, "sliding_window": 16, "layer_types": _MIXED}, ()),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, ()),
    "gpt2": ("gpt2", _GPT2, _DROP_GPT2),
}
FAMILIES = tuple(_SPECS)

_OTHERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}, ()),
    "qwen2_sliding": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "layer_types": _MIXED[::-1],
        },
        (),
    ),
    "qwen3_tied": ("qwen3", {"head_dim": HEAD, "tie_word_embeddings": True}, ()),
    "falcon_alibi": ("falcon", {"alibi": True}, ("num_key_value_heads", "intermediate_size")),
    "falcon_new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
        ("num_key_value_heads", "intermediate_size"),
    ),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}, _DROP_GPT2),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 4}, _DROP_GPT2),
    "gpt_bigcode": ("gpt_bigcode", _GPT2, _DROP_GPT2),
    "mpt": (
        "mpt",
        {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "expansion_ratio": 2},
        _DROP_GPT2,
    ),
    "olmo": ("olmo", {}, ()),
    "olmo3": ("olmo3", {"sliding_window": 16, "layer_types": _MIXED}, ()),
    "persimmon": ("persimmon", {}, ("num_key_value_heads",)),
    "helium": ("helium", {"head_dim": HEAD}, ()),
    "glm": ("glm", {"head_dim": HEAD}, ()),
    "glm4": ("glm4", {"head_dim": HEAD}, ()),
    "ernie4_5": ("ernie4_5", {"head_dim": HEAD}, ()),
    "exaone4": ("exaone4", {"sliding_window": 16, "layer_types": _MIXED}, ()),
    "arcee": ("arcee", {}, ()),
    "nemotron": ("nemotron", {}, ()),
    "seed_oss": ("seed_oss", {"head_dim": HEAD}, ()),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": HEAD}, ()),
    "apertus": ("apertus", {}, ()),
    "phi": ("phi", {}, ()),
    "biogpt": ("biogpt", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, ()),
    "xglm": (
        "xglm",
        {"d_model": HIDDEN, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        _DROP_GPT2,
    ),
}
OTHER_FAMILIES = tuple(_OTHERS)

# transformers has no sdpa path for these.
EAGER_ONLY = frozenset({"gemma2", "bloom", "mpt", "gptj", "codegen", "xglm"})


def sample(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a test, of which only `kept` run by default; more of the same is for `make test-all`."""
    cases = list(cases)
    assert all(k in cases for k in kept), f"{kept} are not all among {cases}"
    marks = pytest.mark.slow
    values = lambda c: c if isinstance(c, tuple) else (c,)  # noqa: E731
    return [c if c in kept else pytest.param(*values(c), marks=marks) for c in cases]


def impls(family: str) -> tuple[str, ...]:
    return ("eager",) if family in EAGER_ONLY else ("sdpa", "eager")


def set_dropout(config: Any, p: float) -> None:
    """Every probability of dropout in the config, whatever the family calls it."""
    for key, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, p)


def make_config(family: str, impl: str | None = None, **over: Any) -> Any:
    model_type, extra, leave_out = {**_SPECS, **_OTHERS}[family]
    base = {k: v for k, v in _BASE.items() if k not in leave_out}
    config = CONFIG_MAPPING[model_type](**{**base, **extra, "attn_implementation": impl or impls(family)[0]})
    set_dropout(config, 0.0)
    for key, value in over.items():
        assert hasattr(config, key), f"{family} has no config entry {key!r}"
        setattr(config, key, value)
    return config


def perturb(model: nn.Module, seed: int, std: float = 0.1) -> None:
    """Move every parameter off 0 and 1, so that no wrong gradient hides behind a zero."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p), alpha=std)


def build(
    family: str, impl: str | None = None, dtype: torch.dtype = torch.float64, seed: int = 0, **over: Any
) -> Any:
    """A tiny model in training mode; the same arguments give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(family, impl, **over), dtype=torch.float32)
    model = model.to(dtype).train()
    model = model if DEVICE.type == "cpu" else model.to(DEVICE)  # a test makes one on meta
    perturb(model, seed + 1)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
    return torch.randint(3, VOCAB, (batch, length), generator=gen).to(DEVICE)


def plain(batch: int, length: int, seed: int = 0, holes: bool = True) -> dict[str, torch.Tensor]:
    """Ids and labels; some labels are -100, never all of those that count."""
    ids = tokens(batch, length, seed)
    labels = ids.clone()
    if holes and length > 4:
        labels[:, 3::5] = -100
    return {"input_ids": ids, "labels": labels}


def padded(
    length: int, side: str, pads: tuple[int, ...] = (0, 13), label_pads: bool = False
) -> dict[str, torch.Tensor]:
    """A batch with `pads[b]` pad tokens in row b, on one side, with an attention mask."""
    batch = plain(len(pads), length, seed=7)
    mask = torch.ones(len(pads), length, dtype=torch.long, device=DEVICE)
    for row, n in enumerate(pads):
        if n:
            mask[row, slice(length - n, None) if side == "right" else slice(0, n)] = 0
    ids = batch["input_ids"].masked_fill(mask == 0, 0)
    labels = ids.clone() if label_pads else batch["labels"].masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
