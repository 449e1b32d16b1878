"""Group relative policy optimisation (GRPO) of an 8B model, long completions and LoRA, on one GPU of 80 GB.

Data: JSON Lines, one problem a line, {"prompt": "...", "answer": "..."}. A completion is worth 1 if it ends
with the answer, and else 0: write a `reward` of your own.
"""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from streambp_fx.integrations import StreamBPCallback


def reward(completions: list[str], answer: list[str], **_: object) -> list[float | None]:
    """One number for each completion; other columns of the data come by their names."""
    return [float(text.strip().endswith(right)) for text, right in zip(completions, answer, strict=True)]


def train(
    model: str,
    data: str,
    output: str,
    *,
    seq_len: int = 32_768,
    chunk: int | str = "auto",
    offload: str = "none",
    max_steps: int = -1,
) -> GRPOTrainer:
    """Train the model in a folder on the problems in a file, and write the adapter to another folder.

    Eight completions of up to `seq_len` tokens are drawn for a prompt. `chunk` and `offload` are options of
    streaming. Training ends after `max_steps` steps; -1: after one pass over the data.
    """
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        reward_funcs=reward,
        args=GRPOConfig(
            output,
            num_generations=8,
            max_completion_length=seq_len,
            per_device_train_batch_size=1,  # one completion at a time,
            gradient_accumulation_steps=8,  # and one group in a step
            learning_rate=1e-6,
            num_train_epochs=1,
            max_steps=max_steps,
            bf16=False,  # layers compute in the dtype of their weights, and the adapters in float32
            activation_checkpointing=False,  # streaming does without
            logging_steps=1,
            report_to="none",
        ),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[StreamBPCallback(chunk=chunk, offload=offload)],
    )
    trainer.train()
    trainer.save_model(output)
    return trainer


if __name__ == "__main__":
    train("path/to/Qwen3-8B", "problems.jsonl", "adapter")
