"""Group relative policy optimisation: a plain function under torch.compile, layers and loss streamed.

A reward is given for each of several completions of one prompt. The completions are drawn with the model as
it is; the loss is a clipped ratio of probabilities, token by token, with a penalty for leaving the reference.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from streambp_fx.measure.live_bytes import peak_live_bytes, peak_live_bytes_compiled

GROUP, PROMPT, COMPLETION = 4, 16, 240


def log_probabilities(model, ids):
    """Log-probability of each token but the first, (batch, length - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def grpo_loss(model, ids, mask, advantage, old, beta=0.04, clip=0.2):
    """`old`: log-probabilities before the step, which serve as the reference as well."""
    new = log_probabilities(model, ids)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    divergence = (old - new).exp() - (old - new) - 1
    return ((beta * divergence - gain) * mask).sum() / mask.sum()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
streamed = torch.compile(grpo_loss, backend="streambp", options={"chunk": 64, "loss_chunk": 32})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
prompt = torch.randint(2048, (1, PROMPT)).expand(GROUP, -1)
mask = torch.cat([torch.zeros(GROUP, PROMPT - 1), torch.ones(GROUP, COMPLETION)], 1)

for step in range(3):
    with torch.no_grad():  # generation runs the model as it is
        ids = model.eval().generate(prompt, max_new_tokens=COMPLETION, do_sample=True)
        old = log_probabilities(model, ids)
    reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1)  # even tokens are good
    advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
    model.train()
    for _ in range(2):
        loss = streamed(model, ids, mask, advantage, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"step {step}: mean reward {reward.mean().item():.3f}, loss {loss.item():.4f}")

batch = (ids, mask, advantage, old)
optimizer.zero_grad()
peak = peak_live_bytes_compiled(lambda: streamed(model, *batch), [*model.parameters(), *batch])
optimizer.zero_grad()
unstreamed = peak_live_bytes(lambda: grpo_loss(model, *batch).backward(), [*model.parameters(), *batch])
print(f"activations and gradients: {peak / 2**20:.1f} MiB streamed, {unstreamed / 2**20:.1f} MiB unstreamed")
