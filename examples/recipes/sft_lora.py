"""Supervised fine-tuning of an 8B model on long texts with LoRA, on one GPU of 24, 48 or 80 GB.

Data: JSON Lines, one example a line, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]} or {"prompt": "...", "completion": "..."} or {"text": "..."}.
"""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from streambp_fx.integrations import StreamBPCallback

# Tokens of a sequence that are predicted to fit, with Qwen3-8B: see docs/recipes.md.
SEQ_LEN = {"24GB": 16_384, "48GB": 65_536, "80GB": 131_072}


def train(
    model: str,
    data: str,
    output: str,
    *,
    gpu: str = "24GB",
    seq_len: int | None = None,
    chunk: int | str = "auto",
    offload: str = "none",
    max_steps: int = -1,
) -> SFTTrainer:
    """Fine-tune the model in a folder on the examples in a file, and write the adapter to another folder.

    Longer examples are cut at `seq_len` tokens (None: what `SEQ_LEN` says of `gpu`). `chunk` and `offload`
    are options of streaming. Training ends after `max_steps` steps; -1: after one pass over the data.
    """
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        args=SFTConfig(
            output,
            max_length=seq_len or SEQ_LEN[gpu],
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            learning_rate=1e-4,
            lr_scheduler_type="cosine",
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
    train("path/to/Qwen3-8B", "examples.jsonl", "adapter", gpu="24GB")
