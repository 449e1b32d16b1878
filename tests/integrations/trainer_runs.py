"""Tiny training runs with the trainers of transformers and TRL, streamed and not, and their comparison."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import streambp_fx
from streambp_fx.integrations import StreamBPCallback

datasets.disable_progress_bars()
logging.getLogger("trl").setLevel(logging.ERROR)

VOCAB, CHUNK, LOSS_CHUNK, STEPS = 97, 16, 8, 5
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", ":"]
WORDS = [f"w{k}" for k in range(VOCAB - len(SPECIAL))]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' <eos> ' }}{% endgeneration %}{% else %}{{ m['content'] + ' <eos> ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
# Entries of a log that tell the time, or that only a streamed run has.
TIMES = ("runtime", "per_second", "time", "flos", "streambp")
Make = Callable[..., Trainer]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    vocabulary = {word: k for k, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{n}_token": f"<{n}>" for n in ("pad", "bos", "eos", "unk")}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.chat_template = TEMPLATE
    return found


def config(**over: Any) -> LlamaConfig:
    return LlamaConfig(**{
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **over,
    })  # fmt: skip


def experts(**over: Any) -> Qwen3MoeConfig:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return Qwen3MoeConfig(**{**config().to_dict(), "model_type": "qwen3_moe", **own, **over})


def hybrid(**over: Any) -> Qwen3NextConfig:
    """A layer with a recurrence, and one with attention; both have experts."""
    own = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 24, "num_experts": 4,
    }  # fmt: skip
    return Qwen3NextConfig(**{**experts().to_dict(), "model_type": "qwen3_next", **own, **over})


def build(
    auto: Any = AutoModelForCausalLM, seed: int = 0, make: Callable[..., Any] = config, **over: Any
) -> Any:
    """A tiny model; the same arguments give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = auto.from_config(make(**over))
        for parameter in made.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return made.train()


def classifier(seed: int = 0) -> Any:
    return build(AutoModelForSequenceClassification, seed, num_labels=1)


def on_disk(folder: Path) -> Callable[[], Any]:
    """A model with a name, for trainers that load the reference model by it."""
    build().save_pretrained(folder)
    return lambda: AutoModelForCausalLM.from_pretrained(folder).train()


def lora(**over: Any) -> Any:
    """All linear layers adapted, by matrices that are not zero at the start."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(build(), LoraConfig(**{**settings, **over}))


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[k] for k in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def settings(folder: Path, **over: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "learning_rate": 3e-3, "bf16": False,
        "disable_tqdm": True, **over,
    }  # fmt: skip


# ---- one function a trainer: model, folder, settings -> trainer


def hf(model: Any, folder: Path, **over: Any) -> Trainer:
    """`transformers.Trainer` on ragged batches."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (40 + k,), generator=generator).tolist() for k in range(20)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    extra = {k: over.pop(k) for k in ("compute_loss_func", "callbacks") if k in over}
    return Trainer(
        model=model, args=TrainingArguments(**settings(folder, **over)), train_dataset=data,
        eval_dataset=data[:4], data_collator=DataCollatorForSeq2Seq(tokenizer(), padding=True), **extra,
    )  # fmt: skip


def _trl(kind: str, model: Any, folder: Path, data: Any, over: dict[str, Any], **extra: Any) -> Trainer:
    import trl

    own = {"gradient_checkpointing": False, **over}  # which is on by default in some of TRL's trainers
    arguments = getattr(trl, f"{kind}Config")(**settings(folder, **own))
    columns = Dataset.from_dict(data)
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=columns, processing_class=tokenizer(), **extra
    )


def sft(model: Any, folder: Path, **over: Any) -> Trainer:
    return _trl("SFT", model, folder, {"text": [words(30 + 5 * k, k) for k in range(10)]}, over)


def sft_chat(model: Any, folder: Path, **over: Any) -> Trainer:
    """Conversations, of which the assistant's part counts."""
    turns = [(words(12 + k, k), words(20 + 3 * k, 50 + k)) for k in range(10)]
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    return _trl("SFT", model, folder, {"messages": chats}, {"assistant_only_loss": True, **over})


def sft_completion(model: Any, folder: Path, **over: Any) -> Trainer:
    """Prompts and completions, of which the completion counts."""
    data = {"prompt": [words(10 + k, k) + " " for k in range(10)], "completion": _answers(100, 20, 2)}
    return _trl("SFT", model, folder, data, {"completion_only_loss": True, **over})


def _answers(seed: int, first: int, step: int) -> list[str]:
    return [words(first + step * k, seed + k) for k in range(10)]


def _prompts() -> list[str]:
    return [words(10 + k, k) + " " for k in range(10)]


def dpo(model: Any, folder: Path, **over: Any) -> Trainer:
    """With a reference model of its own, or the model with its adapter off."""
    data = {"prompt": _prompts(), "chosen": _answers(100, 12, 2), "rejected": _answers(200, 30, -2)}
    reference = {} if hasattr(model, "peft_config") else {"ref_model": build(seed=1).eval()}
    return _trl("DPO", model, folder, data, over, **reference)


def kto(model: Any, folder: Path, **over: Any) -> Trainer:
    data = {
        "prompt": _prompts(),
        "completion": _answers(100, 12, 2),
        "label": [k % 2 == 0 for k in range(10)],
    }
    return _trl("KTO", model, folder, data, over, ref_model=build(seed=1).eval())


def grpo(model: Any, folder: Path, **over: Any) -> Trainer:
    """Completions are drawn with the model that is trained."""
    over = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 24, **over}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(word in text for word in WORDS[:40]) / 10 for text in completions]

    return _trl("GRPO", model, folder, {"prompt": _prompts()}, over, reward_funcs=reward)


def reward(model: Any, folder: Path, **over: Any) -> Trainer:
    data = {"chosen": _answers(100, 12, 2), "rejected": _answers(200, 32, -1)}
    return _trl("Reward", model, folder, data, over)


# ---- running and comparing


@dataclass
class Run:
    """What a training run leaves."""

    trainer: Trainer
    model: Any
    log: list[dict[str, Any]]
    parameters: dict[str, torch.Tensor]
    schedule: Any = None


def train(
    make: Make,
    factory: Callable[[], Any],
    folder: Path,
    how: str | None,
    resume: str | None = None,
    **over: Any,
) -> Run:
    """Train for some steps.

    Args:
        make: the trainer.
        factory: the model.
        folder: for the trainer's files.
        how: None, "transform" (before the trainer is made) or "callback".
        resume: a checkpoint to start from.
        over: settings of the trainer.
    """
    torch._dynamo.reset()
    model = factory()
    if how == "transform":
        streambp_fx.transform(model, chunk=CHUNK, loss_chunk=LOSS_CHUNK)
    trainer = make(model, folder, **over)
    if how == "callback":
        trainer.add_callback(StreamBPCallback(chunk=CHUNK, loss_chunk=LOSS_CHUNK))
    handler = trainer.callback_handler
    handler.callbacks = [c for c in handler.callbacks if "Printer" not in type(c).__name__]
    schedules = Schedules()
    trainer.add_callback(schedules)
    torch.manual_seed(0)
    trainer.train(resume_from_checkpoint=resume)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Run(trainer, model, trainer.state.log_history, parameters, schedules.last)


class Schedules(TrainerCallback):
    """Keeps the schedule of the last step, which a restored model has no more."""

    last: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.last = streambp_fx.schedule(model)


#: Where model and reference are the same function (an adapter before its first step), rewards are zero, and
#: how many are above others is a count of the signs of zeros: rounding decides.
TIE = 1e-6


def assert_same(got: Run, want: Run, metrics: float = 1e-5, parameters: float = 1e-4) -> None:
    """Every logged number, and every parameter; and the run has moved them.

    Args:
        got: the streamed run.
        want: the unstreamed run.
        metrics: allowed difference of a number in the log, relative to one plus its size.
        parameters: allowed relative difference of a parameter in the L2 norm.
    """
    assert len(got.log) == len(want.log) > 0
    wrong = []
    for found, expected in zip(got.log, want.log, strict=True):
        assert {k for k in found if "streambp" not in k} == expected.keys()
        for name, number in expected.items():
            if not isinstance(number, (int, float)) or any(t in name for t in TIMES):
                continue
            if name == "rewards/accuracies" and abs(expected["rewards/margins"]) < TIE:
                continue
            if not abs(found[name] - number) <= metrics * (1 + abs(number)):
                wrong.append(f"step {expected.get('step')}, {name}: {found[name]}, unstreamed {number}")
    for name, value in want.parameters.items():
        error = float((got.parameters[name] - value).norm() / value.norm())
        if not error <= parameters:
            wrong.append(f"{name}: relative difference {error:.2e}")
    assert not wrong, "\n".join(wrong[:20])


def check(
    make: Make,
    folder: Path,
    factory: Callable[[], Any] = build,
    how: str = "transform",
    layers: int = 2,
    **over: Any,
) -> Run:
    """A streamed run is the unstreamed one, and it was streamed: all segments, layer by layer.

    Args:
        make, folder, factory, how, over: see `train`.
        layers: segments of layers that there are.
    """
    want = train(make, factory, folder / "unstreamed", None, **over)
    got = train(make, factory, folder / "streamed", how, **over)
    start = dict(factory().named_parameters())
    moved = [n for n, p in want.parameters.items() if n in start and not p.equal(start[n])]
    assert moved, "nothing was trained"
    assert_same(got, want)
    if how == "transform":
        assert_streamed(got.model, layers)
    return got


def assert_streamed(model: Any, layers: int = 2) -> None:
    schedule = streambp_fx.schedule(model)
    assert schedule is not None, "nothing was compiled"
    assert not [s.reason for s in schedule.segments if not s.chunked], str(schedule)
    assert sum(s.kind == "layer" for s in schedule.segments) == layers, str(schedule)
