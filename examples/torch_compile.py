"""The same compiler as a backend of torch.compile: found by its name, no import of streambp_fx needed."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).train()
compiled = torch.compile(model, backend="streambp", options={"chunk": 64, "loss_chunk": 32})


def batch(length: int) -> torch.Tensor:
    """Counting modulo 50: something that can be learnt, (1, length)."""
    return (torch.arange(length) % 50)[None]


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, length in enumerate([256, 256, 300, 511]):  # other lengths compile nothing
    ids = batch(length)
    output = compiled(input_ids=ids, labels=ids)
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    print(f"step {step}: {length} tokens, loss {output.loss.item():.3f}")

# Logits were not stored. They are computed here, because somebody reads them.
output = compiled(input_ids=batch(100), labels=batch(100))
print("logits:", type(output.logits).__name__, tuple(output.logits.shape))
print("most likely after 49:", int(output.logits[0, -1].argmax()))

# Evaluation and generation run the model as it is.
model.eval()
with torch.no_grad():
    print("generated:", model.generate(batch(8), max_new_tokens=4, do_sample=False)[0, 8:].tolist())
