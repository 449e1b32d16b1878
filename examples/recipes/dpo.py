"""Direct preference optimisation (DPO) of an 8B model with long answers and LoRA, on one GPU of 80 GB.

Data: JSON Lines, one pair a line, {"prompt": "...", "chosen": "...", "rejected": "..."}.
"""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from streambp_fx.integrations import StreamBPCallback


def train(
    model: str,
    data: str,
    output: str,
    *,
    seq_len: int = 65_536,
    chunk: int | str = "auto",
    offload: str = "none",
    max_steps: int = -1,
) -> DPOTrainer:
    """Train the model in a folder on the pairs in a file, and write the adapter to another folder.

    A step holds both answers of a pair; prompt and answer are cut at `seq_len` tokens. `chunk` and `offload`
    are options of streaming. Training ends after `max_steps` steps; -1: after one pass over the data.
    """
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        args=DPOConfig(
            output,
            max_length=seq_len,
            beta=0.1,
            # The reference is the model without its adapter. It runs over all pairs before the first step.
            precompute_ref_log_probs=True,
            precompute_ref_batch_size=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            learning_rate=1e-5,
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
    train("path/to/Qwen3-8B", "pairs.jsonl", "adapter")
