"""A training loop of one's own with accelerate: one line more, before or after `prepare`."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx


def train(streamed: bool = True, mixed_precision: str = "no") -> list[float]:
    """Losses of four optimizer steps of two batches each, of a tiny model on random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.utils.data.DataLoader(torch.randint(100, (16, 512)), batch_size=2)

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    if streamed:
        streambp_fx.transform(model, chunk=128)  # the one line
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    losses = []
    for ids in rows:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if streamed:
        print(streambp_fx.status(accelerator.unwrap_model(model)))
    return losses


if __name__ == "__main__":
    print([round(loss, 4) for loss in train()])
