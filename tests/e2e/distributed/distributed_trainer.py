"""The Trainer of transformers and trainers of TRL with FSDP2: what one process runs."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from in_processes import counted

sys.path.append(str(Path(__file__).parents[2] / "integrations"))
SETTINGS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29700",  # asked for, and not used: there is a group already
}


def train_with_trainer(rank: int, kind: str, model: str, streamed: bool) -> dict[str, Any]:
    """The log of three steps, the collectives, and what was streamed.

    Args:
        kind: "trainer", "sft" or "dpo".
        model: "dense", "tied", "lora" or "bf16".
    """
    os.environ.update(SETTINGS)
    _let_accelerate_shard_on_a_cpu()
    import trainer_runs
    from transformers import Trainer, TrainingArguments

    import streambp_fx
    from streambp_fx.integrations import StreamBPCallback

    made = trainer_runs.build(**({"tie_word_embeddings": True} if model == "tied" else {}))
    if model == "lora":
        import peft

        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(0)
        made = peft.get_peft_model(made, settings)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        arguments: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "save_strategy": "no", "fsdp": True,
            "bf16": model == "bf16", "gradient_checkpointing": False, "optim": "adamw_torch",
            "disable_tqdm": True, "fsdp_config": {
                "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "reshard_after_forward": True,
            },
        }  # fmt: skip
        if kind == "trainer":
            trainer: Any = Trainer(made, TrainingArguments(**arguments), train_dataset=_rows())
        else:
            trainer = _of_trl(kind, made, arguments)
        if streamed:
            trainer.add_callback(StreamBPCallback(chunk=8))
        seen = _Seen()
        trainer.add_callback(seen)
        with counted() as found:
            trainer.train()
    ours = [str(w.message) for w in said if issubclass(w.category, streambp_fx.StreamBPWarning)]
    logs = [{k: v for k, v in h.items() if k in ("loss", "grad_norm")} for h in trainer.state.log_history]
    return {"logs": logs, "collectives": dict(found), "chunked": seen.chunked, "warned": ours}


def _let_accelerate_shard_on_a_cpu() -> None:
    """Accelerate shards for the devices in a list of its own, which has no CPU."""
    from accelerate.state import DistributedType, PartialState

    real = PartialState.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begin


def _rows() -> Any:
    from datasets import Dataset

    numbers = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 97, (37,), generator=numbers).tolist() for _ in range(16)]
    return Dataset.from_list([{"input_ids": i, "labels": i, "attention_mask": [1] * 37} for i in ids])


def _of_trl(kind: str, model: Any, arguments: dict[str, Any]) -> Any:
    import trainer_runs
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    words = trainer_runs.WORDS
    if kind == "sft":
        texts = [" ".join(words[k : k + 9 + 3 * k]) for k in range(16)]
        data = Dataset.from_list([{"text": t} for t in texts])
        return SFTTrainer(
            model, SFTConfig(**arguments), train_dataset=data, processing_class=trainer_runs.tokenizer()
        )
    pairs = [
        {"prompt": " ".join(words[k : k + 5]), "chosen": " ".join(words[: k + 9]), "rejected": words[k]}
        for k in range(16)
    ]
    return DPOTrainer(
        model,
        args=DPOConfig(**arguments),
        train_dataset=Dataset.from_list(pairs),
        processing_class=trainer_runs.tokenizer(),
    )


class _Seen:
    """A callback that notes what was streamed."""

    chunked: list[bool] | None = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        import streambp_fx

        schedule = streambp_fx.schedule(model)
        self.chunked = None if schedule is None else [s.chunked for s in schedule.segments]
