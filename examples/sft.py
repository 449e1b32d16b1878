"""Supervised fine-tuning on answers only: a plain function under torch.compile, layers and loss streamed."""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from streambp_fx.measure.live_bytes import peak_live_bytes, peak_live_bytes_compiled

LENGTH, PROMPT = 1024, 256  # tokens of a sequence, and how many of them are the prompt


def sft_loss(model, ids, mask):
    """Mean negative log-likelihood of the tokens that `mask` (batch, length) marks."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    rows = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = mask[:, 1:].flatten()
    return (rows * weight).sum() / weight.sum()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).train()
ids = torch.randint(100, (2, LENGTH))  # of 4096 words only 100 are used: something that can be learnt
mask = torch.zeros(2, LENGTH)
mask[:, PROMPT:] = 1

streamed = torch.compile(sft_loss, backend="streambp", options={"chunk": 256, "loss_chunk": 64})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(4):
    loss = streamed(model, ids, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

known = [*model.parameters(), ids, mask]
optimizer.zero_grad()
peak = peak_live_bytes_compiled(lambda: streamed(model, ids, mask), known)
optimizer.zero_grad()
unstreamed = peak_live_bytes(lambda: sft_loss(model, ids, mask).backward(), known)
print(f"activations and gradients: {peak / 2**20:.1f} MiB streamed, {unstreamed / 2**20:.1f} MiB unstreamed")
