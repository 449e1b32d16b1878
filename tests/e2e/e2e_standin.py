"""What the harness is tried on without a compiler: right, right with other roundings, and wrong."""

from __future__ import annotations

from typing import Any

import torch


def identity(model: Any, **options: Any) -> Any:
    """The model as it is: passes every test of exactness."""
    return model


def rows(model: Any, **options: Any) -> Any:
    """Each sequence of the batch by itself: the same gradient, bracketed differently."""
    forward = model.forward

    def by_rows(**batch: Any) -> Any:
        labels = batch.get("labels")
        if not model.training or labels is None or not torch.is_grad_enabled():
            return forward(**batch)
        size = labels.shape[0]
        keys = [k for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == size]
        count = (labels[:, 1:] != -100).sum()
        total: Any = 0
        for row in range(size):
            part = {**batch, **{k: batch[k][row : row + 1] for k in keys}}
            n = (part["labels"][:, 1:] != -100).sum()
            if n or "num_items_in_batch" in batch:
                out = forward(**part)
                total = total + out.loss * (1 if "num_items_in_batch" in batch else n.item() / count.item())
        out.loss, out.logits = total, None
        return out

    model.forward = by_rows
    return model


def _hooked(model: Any, pick: int, change: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    trained[pick % len(trained)].register_hook(change)
    return model


def scaled_gradient(model: Any, **options: Any) -> Any:
    """One gradient is off by a millionth."""
    return _hooked(model, 3, lambda g: g * (1 + 1e-6))


def shifted_row(model: Any, **options: Any) -> Any:
    """The gradient of the embedding is off by one row."""
    return _hooked(model, 0, lambda g: g.roll(1, 0))


def wrong_loss(model: Any, **options: Any) -> Any:
    """The loss is off by a millionth and the gradient is right."""
    forward = model.forward

    def shifted(**batch: Any) -> Any:
        out = forward(**batch)
        out.loss = out.loss + 1e-6 * out.loss.detach()
        return out

    model.forward = shifted
    return model


def lost_gradient(model: Any, **options: Any) -> Any:
    """One parameter gets no gradient."""
    p = list(model.parameters())[-1]
    p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", None))
    return model


RIGHT = {"identity": identity, "rows": rows}
WRONG = {
    "scaled_gradient": scaled_gradient,
    "shifted_row": shifted_row,
    "wrong_loss": wrong_loss,
    "lost_gradient": lost_gradient,
}
