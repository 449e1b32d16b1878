"""Proximal policy optimisation with a value head: two heads on one model, streamed together."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from streambp_fx.measure.live_bytes import peak_live_bytes, peak_live_bytes_compiled

LENGTH, PROMPT = 512, 128


def policy_and_values(model, head, ids):
    """Log-probabilities of the tokens but the first, and values of the states before, (batch, length - 1)."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = model.lm_head(hidden)
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen, head(hidden).squeeze(-1)


def ppo_loss(model, head, ids, mask, old, advantage, returns, clip=0.2):
    """Clipped ratio for the policy, and squared error for the values with half the weight."""
    new, values = policy_and_values(model, head, ids)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return ((0.5 * (values - returns).square() - gain) * mask).sum() / mask.sum()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model, head = AutoModelForCausalLM.from_config(config).train(), nn.Linear(64, 1)
parameters = [*model.parameters(), *head.parameters()]
ids = torch.randint(2048, (2, LENGTH))
mask = torch.zeros(2, LENGTH - 1)
mask[:, PROMPT:] = 1
reward = (ids[:, 1:] % 2 == 0).float()  # even tokens are good
returns = reward.flip(1).cumsum(1).flip(1) / LENGTH

streamed = torch.compile(ppo_loss, backend="streambp", options={"chunk": 128, "loss_chunk": 32})
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
with torch.no_grad():
    old, values = policy_and_values(model, head, ids)
    batch = (ids, mask, old, returns - values, returns)
for step in range(4):
    loss = streamed(model, head, *batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

optimizer.zero_grad()
peak = peak_live_bytes_compiled(lambda: streamed(model, head, *batch), [*parameters, *batch])
optimizer.zero_grad()
unstreamed = peak_live_bytes(lambda: ppo_loss(model, head, *batch).backward(), [*parameters, *batch])
print(f"activations and gradients: {peak / 2**20:.1f} MiB streamed, {unstreamed / 2**20:.1f} MiB unstreamed")
