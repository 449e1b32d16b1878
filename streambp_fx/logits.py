"""Logits that nobody reads in training are taken off a model's output, so that they need not be made."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .runtime.lazy import LazyTensor


def vocabularies(model: nn.Module) -> tuple[int, ...]:
    """How wide logits of a vocabulary may be: the rows of tables, and of weights with more rows than columns.

    The scores of a classifier are not as wide as any of them. They cost nothing, and stay.
    """
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = (p.shape for p in model.parameters() if p.dim() == 2)
    return tuple(sorted(tables | {rows for rows, columns in matrices if rows > columns}))


def without_logits(output: Any, widths: tuple[int, ...]) -> tuple[Any, Any]:
    """A class, and the fields of an output of that class whose logits are None; or None, and the output.

    Logits are left out next to a loss, and if they have one of these widths. Dynamo traces this.
    """
    if isinstance(output, tuple) or not _is_wide(_field(output, "logits"), widths):
        return None, output
    if not isinstance(_field(output, "loss"), torch.Tensor):
        return None, output
    if isinstance(output, dict):
        return type(output), {k: None if k == "logits" else v for k, v in output.items()}
    if dataclasses.is_dataclass(output):
        names = type(output).__dataclass_fields__  # type: ignore[union-attr]
        return type(output), {k: None if k == "logits" else getattr(output, k) for k in names}
    output.logits = None
    return None, output


def rebuilt(kind: Any, output: Any) -> Any:
    """The model's output from what `without_logits` returned."""
    return output if kind is None else kind(**output)


def without_lazy(output: Any) -> Any:
    """None for each lazy tensor: "drop" is about what the model returns, not about what hooks keep of it."""
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    if not any(isinstance(leaf, LazyTensor) for leaf in leaves):
        return output
    return torch.utils._pytree.tree_unflatten(
        [None if isinstance(leaf, LazyTensor) else leaf for leaf in leaves], spec
    )


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _is_wide(logits: Any, widths: tuple[int, ...]) -> bool:
    return isinstance(logits, torch.Tensor) and logits.dim() > 0 and logits.shape[-1] in widths
