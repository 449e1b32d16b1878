"""Hugging Face's Trainer, unmodified but for one line: the callback. TRL's trainers take it as well."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from streambp_fx.integrations import StreamBPCallback

LENGTH = 1024
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
rows = torch.randint(100, (10, LENGTH))  # of 4096 words only 100 are used: something that can be learnt
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=arguments,
        train_dataset=data,
        callbacks=[StreamBPCallback(chunk=256)],  # the one line
    )
    trainer.train()

for entry in trainer.state.log_history[:-1]:
    peak = entry["streambp/peak_bytes"] / 2**20
    print(f"step {entry['step']}: loss {entry['loss']:.4f}, peak of activations {peak:.1f} MiB")
