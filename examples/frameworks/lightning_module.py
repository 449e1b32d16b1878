"""A LightningModule around a model of transformers: streamed from `configure_model` on."""

import lightning
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx


class LanguageModel(lightning.LightningModule):
    """Predicts the next token."""

    def __init__(self, streamed: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(config)
        self.streamed, self.losses = streamed, []

    def configure_model(self):
        """Called by the Trainer before its strategy wraps the model."""
        if self.streamed:
            streambp_fx.transform(self.model, chunk=128)  # the one line

    def on_train_start(self):
        """A model that comes in evaluation mode stays in it, and nothing is streamed then."""
        self.train()

    def training_step(self, ids):
        """The loss of a batch of token ids, (batch, tokens)."""
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(streamed: bool = True, precision: str = "32-true") -> list[float]:
    """Losses of eight steps of a tiny model on random tokens."""
    torch.manual_seed(0)
    module = LanguageModel(streamed)
    rows = torch.utils.data.DataLoader(torch.randint(100, (16, 512)), batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, precision=precision, gradient_clip_val=1.0, **quiet
    )
    trainer.fit(module, rows)
    if streamed:
        print(streambp_fx.status(module.model))
    return module.losses


if __name__ == "__main__":
    print([round(loss, 4) for loss in train()])
