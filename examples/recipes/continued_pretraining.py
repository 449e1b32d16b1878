"""Continued pre-training of a 1.5B model on sequences of 256 thousand tokens, on one GPU of 48 GB and a disk.

Data: JSON Lines, one text a line, {"text": "..."}. Texts are put one behind another and cut to equal lengths.
The inputs of the layers go to a temporary file: set TMPDIR to a folder on a fast disk with room for them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from streambp_fx.integrations import StreamBPCallback


def sequences(path: str, tokenizer: Any, seq_len: int) -> Iterator[dict[str, list[int]]]:
    """The texts of a file as token ids and labels, `seq_len` tokens each; a shorter rest is dropped."""
    ids: list[int] = []
    for row in load_dataset("json", data_files=path, split="train"):
        ids += [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        while len(ids) >= seq_len:
            yield {"input_ids": ids[:seq_len], "labels": ids[:seq_len]}
            ids = ids[seq_len:]


def train(
    model: str,
    data: str,
    output: str,
    *,
    seq_len: int = 262_144,
    chunk: int | str = "auto",
    offload: str = "disk",
    max_steps: int = -1,
) -> Trainer:
    """Train the model in a folder on the texts in a file, and write it to another folder.

    A sequence has `seq_len` tokens. `chunk` and `offload` are options of streaming. Training ends after
    `max_steps` steps; -1: after one pass over the data.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        # In bfloat16 most steps would be too small to change a weight. Products are in bfloat16 all the same.
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=tokenizer,
        train_dataset=Dataset.from_generator(
            sequences, gen_kwargs={"path": data, "tokenizer": tokenizer, "seq_len": seq_len}
        ),
        args=TrainingArguments(
            output,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            learning_rate=1e-5,
            lr_scheduler_type="cosine",
            num_train_epochs=1,
            max_steps=max_steps,
            bf16=torch.cuda.is_available(),  # mixed precision
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
    train("path/to/Qwen2.5-1.5B", "texts.jsonl", "model")
