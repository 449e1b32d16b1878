"""A training loop with Lightning Fabric: one line more, before `setup`."""

import lightning
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx


def train(streamed: bool = True, precision: str = "32-true") -> list[float]:
    """Losses of eight steps of a tiny model on random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.utils.data.DataLoader(torch.randint(100, (16, 512)), batch_size=2)

    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    if streamed:
        streambp_fx.transform(model, chunk=128)  # the one line
    model, optimizer = fabric.setup(model, optimizer)
    rows = fabric.setup_dataloaders(rows)
    losses = []
    for ids in rows:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    if streamed:
        print(streambp_fx.status(model.module))
    return losses


if __name__ == "__main__":
    print([round(loss, 4) for loss in train()])
