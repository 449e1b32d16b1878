"""Fine-tune a causal language model with its training step streamed, and compare with the step unstreamed.

The model is tiny and made from a config: this runs in seconds and downloads nothing. For a real one put
`AutoModelForCausalLM.from_pretrained("path/to/model")` in its place, and the tokens of your text for `ids`.
"""

import pathlib

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx
from streambp_fx.measure.live_bytes import peak_live_bytes

TOKENS, CHUNK = 2048, 512


def tiny_model() -> torch.nn.Module:
    """Two layers; the vocabulary is wide for the model's size, as it is in real ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def text(count: int) -> torch.Tensor:
    """The bytes of this file as token ids, (1, count), repeated as often as it takes."""
    ids = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
    return ids.repeat(-(-count // len(ids)))[None, :count]


model, ids = tiny_model(), text(TOKENS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def forward_and_backward() -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def peak() -> str:
    """The most that activations and gradients take at once, counted tensor by tensor."""
    optimizer.zero_grad()
    return f"{peak_live_bytes(forward_and_backward, [*model.parameters(), ids]) / 2**20:.1f} MiB"


streambp_fx.transform(model, chunk=CHUNK)  # the only line that streaming needs
for step in range(6):
    loss = forward_and_backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

forward_and_backward()
streamed = {name: p.grad.clone() for name, p in model.named_parameters()}
streamed_peak = peak()

streambp_fx.restore(model)  # as it was
unstreamed_peak = peak()
difference = max(
    float((streamed[name] - p.grad).norm() / p.grad.norm()) for name, p in model.named_parameters()
)
print(f"activations and gradients: {streamed_peak} streamed, {unstreamed_peak} unstreamed")
print(f"largest relative difference of a gradient: {difference:.1e} (float32)")
