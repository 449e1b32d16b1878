"""Fine-tuning of all weights of a 1.5B model on texts of 128 thousand tokens, on one GPU of 80 GB.

Data: JSON Lines, one example a line, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]} or {"prompt": "...", "completion": "..."} or {"text": "..."}.
"""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from streambp_fx.integrations import StreamBPCallback


def train(
    model: str,
    data: str,
    output: str,
    *,
    seq_len: int = 131_072,
    chunk: int | str = "auto",
    offload: str = "none",
    max_steps: int = -1,
) -> SFTTrainer:
    """Fine-tune the model in a folder on the examples in a file, and write it to another folder.

    Longer examples are cut at `seq_len` tokens. `chunk` and `offload` are options of streaming. Training ends
    after `max_steps` steps; -1: after one pass over the data.
    """
    trainer = SFTTrainer(
        # In bfloat16 most steps would be too small to change a weight. Products are in bfloat16 all the same.
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        args=SFTConfig(
            output,
            max_length=seq_len,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            learning_rate=1e-5,
            lr_scheduler_type="cosine",
            num_train_epochs=1,
            max_steps=max_steps,
            bf16=torch.cuda.is_available(),  # mixed precision
            activation_checkpointing=False,  # streaming does without
            logging_steps=1,
            report_to="none",
            save_only_model=True,
        ),
        callbacks=[StreamBPCallback(chunk=chunk, offload=offload)],
    )
    trainer.train()
    trainer.save_model(output)
    return trainer


if __name__ == "__main__":
    train("path/to/Qwen2.5-1.5B", "examples.jsonl", "model")
