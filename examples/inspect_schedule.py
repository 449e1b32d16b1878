"""Look at the schedule of a training step before anything is run; the weights need not even exist."""

import warnings

import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

import streambp_fx

config = MistralConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=3,
    num_attention_heads=16, num_key_value_heads=4, head_dim=64, sliding_window=4096,
)  # fmt: skip
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

schedule = streambp_fx.explain(model, seq_len=65_536, chunk=2048)
print(schedule)


class Centred(nn.Module):
    """Takes the mean of the sequence away from every row: no row can be computed without all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class Model(nn.Module):
    """A model with one part that cannot be streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.centre = nn.Embedding(500, 64), Centred()
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 500)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        x = x + self.down(torch.relu(self.up(x)))
        logits = self.head(self.centre(x))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    partly = streambp_fx.explain(Model(), seq_len=4096, chunk=512)
print()
print(partly)
print()
for warning in caught:
    print(f"{warning.category.__name__}: {warning.message}")
