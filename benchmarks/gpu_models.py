"""The models of `gpu.py`: sizes that people train, cut to some layers."""

from __future__ import annotations

from typing import Any

_LONG: dict[str, Any] = {"max_position_embeddings": 1 << 21, "use_cache": False}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128}
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    **_ATTENTION,
    **_LONG,
}
TINY: dict[str, Any] = {
    **DENSE,
    "vocab_size": 8192,  # wide enough for a peak that the kernel counts
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
}
#: By the name of a case, the sizes of a model and its layers by default (None: as many as fit).
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    # Qwen3-8B
    "dense": (DENSE, None),
    # Qwen3-30B-A3B
    "experts": (
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            **_ATTENTION,
            **_LONG,
        },
        4,
    ),
    # DeepSeek-V2-Lite: latent attention and experts
    "latent": (
        {
            "model_type": "deepseek_v3",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            **_LONG,
        },
        4,
    ),
    # Qwen3-Next-80B-A3B, dense: three recurrences to one attention
    "hybrid": (
        {
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_only_layers": [0, 1, 2, 3],
            **_LONG,
        },
        4,
    ),
}
