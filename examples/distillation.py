"""Distillation: a small model learns from a larger one, which runs in the same streamed step."""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from streambp_fx.measure.live_bytes import peak_live_bytes, peak_live_bytes_compiled

LENGTH = 512


def distillation_loss(student, teacher, ids, temperature=2.0):
    """Kullback-Leibler divergence of the student from the teacher, mean over tokens."""
    with torch.no_grad():
        target = (teacher(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
    own = (student(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
    return F.kl_div(own, target, log_target=True, reduction="none").sum(-1).mean() * temperature**2


def build(layers, width):
    config = LlamaConfig(
        vocab_size=2048, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


torch.manual_seed(0)
student, teacher = build(2, 64).train(), build(3, 96).eval().requires_grad_(False)
teacher.lm_head.weight.mul_(10)  # so that it prefers some words to others
ids = torch.randint(2048, (2, LENGTH))

streamed = torch.compile(distillation_loss, backend="streambp", options={"chunk": 128, "loss_chunk": 32})
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
for step in range(4):
    loss = streamed(student, teacher, ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

known = [*student.parameters(), *teacher.parameters(), ids]
optimizer.zero_grad()
peak = peak_live_bytes_compiled(lambda: streamed(student, teacher, ids), known)
optimizer.zero_grad()
unstreamed = peak_live_bytes(lambda: distillation_loss(student, teacher, ids).backward(), known)
print(f"activations and gradients: {peak / 2**20:.1f} MiB streamed, {unstreamed / 2**20:.1f} MiB unstreamed")
