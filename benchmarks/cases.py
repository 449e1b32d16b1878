"""What is measured: workloads, and the named cases with the ratios that they have to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from streambp_fx.cost.held_bytes import HIDDEN, STATE, STATE_GRADIENTS, STORED

from .errors import BenchmarkError

ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

_DENSE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1 << 20,
    "use_cache": False,
}
_ROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,  # for releases of transformers that read it here
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_DENSE, "num_key_value_heads": 4, "head_dim": 64, **_ROPE},
    "llama": {"model_type": "llama", **_DENSE, "num_key_value_heads": 4, "head_dim": 64, **_ROPE},
    "gemma3": {
        "model_type": "gemma3_text",
        **_DENSE,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gpt_neox": {"model_type": "gpt_neox", **_DENSE},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_DENSE,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        **_ROPE,
    },
    "olmoe": {
        "model_type": "olmoe",
        **_DENSE,
        "intermediate_size": 384,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        **_ROPE,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_DENSE,
        "num_key_value_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "first_k_dense_replace": 1,
        **_ROPE,
    },
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_heads": 16,
        "head_dim": 64,
        "n_groups": 1,
        "time_step_limit": [0.0, 1e9],  # infinity does not survive JSON
        "use_cache": False,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_DENSE,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_only_layers": [0, 1, 2, 3],
        **_ROPE,
    },
}


@dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
        source: a name of `CONFIGS`, or "smollm2" for the real weights of SmolLM2-135M.
        tokens: of each sequence.
        chunk: rows of a chunk of a layer, for modes that have one.
        batch: sequences.
        layers: of the model; None: as many as its config says.
        dtype: of weights and activations.
        changes: of the config's fields.
    """

    source: str
    tokens: int
    chunk: int
    batch: int = 1
    layers: int | None = None
    dtype: str = "float32"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> dict[str, Any] | None:
        """The model's config; None if the source brings its own."""
        if self.source not in CONFIGS:
            return None
        config = {**CONFIGS[self.source], **dict(self.changes)}
        if self.layers is not None:
            config["num_hidden_layers"] = self.layers
            if "layer_types" in config:
                kinds = config["layer_types"]
                config["layer_types"] = [kinds[k % len(kinds)] for k in range(self.layers)]
        return config

    @property
    def model_type(self) -> str:
        """The config's model type, as "qwen3"."""
        config = self.config
        return "llama" if config is None else str(config["model_type"])

    @property
    def model_key(self) -> tuple[Any, ...]:
        """What the weights depend on."""
        return self.source, self.layers, self.dtype, self.changes

    @property
    def title(self) -> str:
        """One line for people."""
        layers = "" if self.layers is None else f", {self.layers} layers"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.source}{layers}, {batch}{self.tokens:,} tokens, chunk {self.chunk}, {self.dtype}"

    def scaled(self, divisor: int) -> Workload:
        """The same with a shorter sequence and, in proportion, shorter chunks."""
        return replace(self, tokens=self.tokens // divisor, chunk=max(64, self.chunk // divisor))


def floors_per_token(config: dict[str, Any], dtype: str = "float32") -> dict[str, int]:
    """Bytes that each token needs at the least, if nothing is offloaded, by cause
    (`streambp_fx.cost.held_bytes`).

    They are the inputs of all layers, the hidden state and its gradient, and of one layer keys, values and
    their gradients.
    """
    hidden, state = config["hidden_size"], key_values(config)
    values = {
        STORED: config["num_hidden_layers"] * hidden,
        HIDDEN: 2 * hidden,
        STATE: 2 * state,
        STATE_GRADIENTS: 2 * state,
    }
    return {cause: count * ELEMENT[dtype] for cause, count in values.items()}


def key_values(config: dict[str, Any]) -> int:
    """Elements that one token has in the keys of a layer, as many as in its values."""
    heads = config["num_attention_heads"]
    return config.get("num_key_value_heads", heads) * head_size(config)


def head_size(config: dict[str, Any]) -> int:
    """Elements of one head of attention."""
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def floor_bytes_per_token(config: dict[str, Any], dtype: str = "float32") -> int:
    """The same of all causes together."""
    return sum(floors_per_token(config, dtype).values())


@dataclass(frozen=True)
class Case:
    """A workload, one of our modes, and what that mode has to reach there.

    Attributes:
        workload: the step.
        mode: ours.
        memory_at_least: how many times less memory than checkpointing; None: nothing is required.
        time_at_most: of checkpointing's time.
        beside: the hand-written mode to come within 15% of, on both figures, if it is measured as well.
        others: modes that are measured as well.
    """

    name: str
    workload: Workload
    mode: str = "streamed"
    memory_at_least: float | None = None
    time_at_most: float | None = None
    beside: str | None = None
    others: tuple[str, ...] = field(default=("checkpointing-chunked-loss", "checkpointing-fused-loss"))

    def modes(self) -> list[str]:
        """Names of the modes that are measured unless others are asked for, each once."""
        wanted = ["checkpointing", *self.others, *([self.beside] if self.beside else []), self.mode]
        return list(dict.fromkeys(wanted))


_SHORT, _LONG = Workload("qwen3", 8192, 2048), Workload("qwen3", 16384, 4096, layers=2)
_EVERY = (
    "eager",
    "checkpointing-chunked-loss",
    "checkpointing-fused-loss",
    "checkpointing-offload",
    "checkpointing-offload-chunked-loss",
    "checkpointing-offload-fused-loss",
    "liger",
    "compile-0.5",
    "compile-0.1",
    "published",
    "reference",
    "reference-attention",
    "streamed-attention",
    "streamed-every-2",
    "streamed-disk",
    "streamed-host",
    "streamed-inductor",
)
_ALL = (
    Case("dense", _SHORT, "streamed", 9.5, 0.92, "reference", _EVERY),
    Case("dense-attention", _SHORT, "streamed-attention", 7.5, 0.80, "reference-attention"),
    Case("dense-512", replace(_SHORT, chunk=512), "streamed", 12, 0.97, "reference"),
    Case("long", _LONG, "streamed", 11, 0.75, "reference", ("checkpointing-fused-loss", "published")),
    Case("long-attention", _LONG, "streamed-attention", 9.5, 0.65, "reference-attention"),
    Case("llama", replace(_SHORT, source="llama"), "streamed", 8, 1.0),
    Case("gemma3", replace(_SHORT, source="gemma3"), "streamed", 8, 1.0),
    Case("gpt_neox", replace(_SHORT, source="gpt_neox"), "streamed", 8, 1.0),
    Case("experts", Workload("qwen3_moe", 8192, 512), "streamed", 8, 1.05),
    Case("experts-olmoe", Workload("olmoe", 8192, 512), "streamed", 8, 1.05),
    Case("latent", Workload("deepseek_v3", 8192, 512), "streamed", 10, 1.05),
    Case("state-space", Workload("mamba2", 8192, 512), "streamed", 8, 1.05),
    Case("hybrid", Workload("qwen3_next", 8192, 512), "streamed", 8, 1.05),
    Case("smollm2", Workload("smollm2", 8192, 1024), "streamed", 6, 1.0),
)
CASES = {case.name: case for case in _ALL}
#: The case that is a search and not a step.
BATCH = "batch"
#: What a quick run measures, in a quarter of the length, for the recorded ratios too.
QUICK = ("dense", "dense-attention", "long", "gemma3")
QUICK_DIVISOR = 4
WITHIN = 1.15


def cases_named(names: list[str]) -> list[Case]:
    """Cases by name.

    Raises:
        BenchmarkError: there is no case of that name.
    """
    for name in names:
        if name not in CASES:
            raise BenchmarkError(f"there is no case {name!r}; cases: {', '.join([*CASES, BATCH])}")
    return [CASES[name] for name in names]


def quick(case: Case) -> Case:
    """The case in a quarter of the length, where nothing is required, and without the slowest peers."""
    others = (
        ("checkpointing-chunked-loss", "streamed-every-2", "streamed-disk") if case.name == "dense" else ()
    )
    return replace(
        case,
        workload=case.workload.scaled(QUICK_DIVISOR),
        memory_at_least=None,
        time_at_most=None,
        others=others,
    )


def shrunk(case: Case) -> Case:
    """A case of the same shape that takes seconds: for trying the machinery, not for figures."""
    small = (("hidden_size", 64), ("intermediate_size", 128), ("vocab_size", 512))
    heads = (("num_attention_heads", 4), ("head_dim", 16))
    source = "llama" if case.workload.config is None else case.workload.source
    kept = () if case.workload.model_type == "gpt_neox" else (("num_key_value_heads", 2),)
    step = replace(
        case.workload, source=source, tokens=256, chunk=64, layers=2, changes=(*small, *heads, *kept)
    )
    return replace(case, workload=step, memory_at_least=None, time_at_most=None)
