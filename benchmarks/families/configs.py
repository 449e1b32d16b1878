"""Tiny configurations of all causal language models of transformers, by the names that they give to sizes."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, HEAD, LAYERS, VOCAB = 64, 1024, 4, 2, 16, 2, 257
EXPERTS, TOP = 8, 2
POSITIONS = 4096

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERT_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size")
#: What a size is called, in the configurations of transformers.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim_model", "embedding_size", "embedding_dim"), HIDDEN
    ),
    **dict.fromkeys(("attention_hidden_size", "emb_dim", "lru_width", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff"), FEED_FORWARD
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "d_inner"), FEED_FORWARD),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"), KEY_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "kv_channels", "d_head", "dim_head"), HEAD),
    **dict.fromkeys(("attention_head_dim", "attention_head_size", "global_head_dim"), HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), HEAD // 2),
    **dict.fromkeys(("qk_head_dim",), HEAD),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 2 * HEAD),
    **dict.fromkeys(("rotary_dim",), HEAD // 2),
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS
    ),
    **dict.fromkeys(EXPERT_COUNTS, EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), TOP),
    **dict.fromkeys(EXPERT_SIZES, FEED_FORWARD // EXPERTS),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), FEED_FORWARD // EXPERTS
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "local_attention", "attention_window_size"), 32
    ),
    **dict.fromkeys(("window_size", "attention_chunk_size"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), KEY_HEADS),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), HEAD),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size",), 16),
    **dict.fromkeys(("index_head_dim",), HEAD),
    **dict.fromkeys(("index_n_heads",), HEADS),
    **dict.fromkeys(("index_topk",), 24),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id"), 1),
    "use_cache": False,
}
_LATENT = {"num_key_value_heads": HEADS}
_ROTARY = {**_LATENT, "head_dim": HEAD // 2}  # of the latent's rotary part
_MIXED = {"num_hidden_layers": 4}
_DECODER = {"is_decoder": True}
_SHARED = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_BY_LAYERS = dict.fromkeys(("full_attention", "sliding_attention"), _SECTIONS)
#: What some need besides: sizes that must fit each other, and layers of every kind.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla"),
        _LATENT,
    ),
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), _ROTARY),
    **dict.fromkeys(
        ("bamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid",
         "kimi_linear", "bailing_hybrid", "minimax", "jamba", "nemotron_h", "granitemoehybrid",
         "recurrent_gemma", "lfm2", "lfm3"),
        _MIXED,
    ),
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie",
         "megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
         "xlm-roberta", "xlm-roberta-xl", "xmod"),
        _DECODER,
    ),
    # with its sparse attention, which reads later tokens, it cannot be a decoder
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": _BY_LAYERS},
    # its attention asks for a number that its configuration does not have by itself
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": KEY_HEADS},
        "ffn_config": {
            "ffn_hidden_size": FEED_FORWARD // EXPERTS, "moe_num_experts": EXPERTS, "moe_top_k": TOP
        },
    },
    "dots3_note_text": _LATENT,
    "falcon_h1": {"mamba_d_ssm": 8 * HEAD},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"global_head_dim": HEAD, "hidden_size_per_layer_input": HEAD},
    "gemma4_unified_text": {"global_head_dim": HEAD},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(("zamba", "zamba2"), _SHARED),
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_COMPOSITE = "a model of several, whose language model is listed by itself"
#: Not causal language models of text by themselves, and why.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified",
         "gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama", "moshi",
         "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5",
         "qwen3_5_moe", "qwen4_exp"),
        _COMPOSITE,
    ),
    "blt": "reads bytes, in patches that depend on their values",
}  # fmt: skip


def families() -> list[str]:
    """All model types that transformers has a causal language model for."""
    return sorted(t for t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if t not in LEFT_OUT)


def make_config(family: str) -> Any:
    """The tiny configuration of a model type."""
    kind = CONFIG_MAPPING[family]
    try:
        known = set(vars(kind()))
    except Exception:  # its defaults do not fit each other
        known = set()
    known |= set(getattr(kind, "__dataclass_fields__", ())) | set(getattr(kind, "attribute_map", ()))
    wanted = {k: v for k, v in SIZES.items() if k in known}
    if known & set(EXPERT_COUNTS) and not known & set(EXPERT_SIZES):  # its experts have the size of a layer
        of_layers = known & {"intermediate_size", "ffn_hidden_size"}
        wanted.update(dict.fromkeys(of_layers, FEED_FORWARD // EXPERTS))
    config = kind(**{**wanted, **OWN.get(family, {})})
    for key in EXPERT_SIZES:  # where another size has the same name as well
        if getattr(config, key, None) == FEED_FORWARD:
            setattr(config, key, FEED_FORWARD // EXPERTS)
    for key, value in vars(config).items():
        random = any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter"))
        if isinstance(value, float) and random:
            setattr(config, key, 0.0)
    return config


def build(family: str) -> Any:
    """A tiny model in training mode, float32, on random weights."""
    transformers.set_seed(0)
    return AutoModelForCausalLM.from_config(make_config(family)).train()
