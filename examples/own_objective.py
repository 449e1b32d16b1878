"""An objective of one's own: a plain function around the model, layers and loss streamed together.

This one is a preference loss: of two answers, the chosen one should become more likely than the rejected one,
measured against what the model thought before training.
"""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx
from streambp_fx.measure.live_bytes import peak_live_bytes, peak_live_bytes_compiled

LENGTH, ANSWER = 768, 512  # tokens of a sequence, and how many of them at its end are the answer


def log_probability(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probability of each answer, (batch,)."""
    logits = model(input_ids=ids).logits[:, :-1]
    rows = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (rows * mask[:, 1:]).sum(1)


def preference_loss(model, ids, mask, reference):
    """`reference`: the log-probabilities before training; the chosen answer is the first of the batch."""
    chosen, rejected = (log_probability(model, ids, mask) - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).train()
ids = torch.randint(2048, (2, LENGTH))
ids[1, :-ANSWER] = ids[0, :-ANSWER]  # both answer the same prompt
mask = torch.zeros(2, LENGTH)
mask[:, -ANSWER:] = 1
with torch.no_grad():
    reference = log_probability(model, ids, mask)

streamed = torch.compile(preference_loss, backend="streambp", options={"chunk": 128, "loss_chunk": 64})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(4):
    loss = streamed(model, ids, mask, reference)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

schedule = streambp_fx.schedule(model)
print(f"{schedule.sweeps} sweeps over the loss head: its gradient depends on the sum over all tokens")

known = [*model.parameters(), ids, mask, reference]
optimizer.zero_grad()
peak = peak_live_bytes_compiled(lambda: streamed(model, ids, mask, reference), known)
optimizer.zero_grad()
unstreamed = peak_live_bytes(lambda: preference_loss(model, ids, mask, reference).backward(), known)
print(f"activations and gradients: {peak / 2**20:.1f} MiB streamed, {unstreamed / 2**20:.1f} MiB unstreamed")
