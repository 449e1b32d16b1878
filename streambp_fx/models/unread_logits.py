"""Logits that nobody reads in training are taken off a model's output, so that they need not be made."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from ..runtime.lazy_tensors import LazyTensor


def vocabularies(model: nn.Module) -> set[int]:
    """How wide logits of a vocabulary may be, as the model says by the interface of transformers.

    Scores of a classifier are not as wide, and stay. A model that does not say it has a table for its tokens,
    the largest of its tables.
    """
    asked = (m for m in model.modules() if hasattr(m, "get_input_embeddings"))
    told = {width for m in asked for width in _widths(m)}
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return told or set(sorted(tables)[-1:])


def _widths(model: Any) -> list[int]:
    found = [getattr(getattr(model, "config", None), "vocab_size", None)]
    for ask in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            part = ask()
        except (AttributeError, NotImplementedError):  # transformers' answer where there are none
            continue
        found += [getattr(part, "num_embeddings", None), getattr(part, "out_features", None)]
    return [width for width in found if isinstance(width, int)]


def without_logits(output: Any, widths: tuple[int, ...]) -> tuple[Any, Any]:
    """A class, and the fields of an output of that class whose logits are None; or None, and the output.

    Logits are left out next to a loss, and if they have one of these widths. Dynamo traces this. Only plain
    dictionaries and outputs of transformers can be made again from their fields: see `without_lazy`.
    """
    if type(output) is not dict and not isinstance(output, ModelOutput):
        return None, output
    logits = output.get("logits")
    if not isinstance(logits, torch.Tensor) or logits.dim() == 0 or logits.shape[-1] not in widths:
        return None, output
    if not isinstance(output.get("loss"), torch.Tensor):
        return None, output
    return type(output), {k: None if k == "logits" else v for k, v in output.items()}


def rebuilt(kind: Any, output: Any) -> Any:
    """The model's output from what `without_logits` returned."""
    if kind is None or kind is dict:
        return output
    made = kind.__new__(kind)  # what its constructor does to the values has been done
    for name in kind.__dataclass_fields__:
        object.__setattr__(made, name, None)
    for name, value in output.items():
        if value is not None:
            made[name] = value
    return made


def without_lazy(output: Any, model: nn.Module) -> Any:
    """The output without logits that are as wide as a vocabulary, and that would be computed when read.

    Others stay: lazy logits mean what they meant. So do those of an output that cannot be copied and changed.
    """
    widths = vocabularies(model)
    if isinstance(output, (tuple, list)):
        return tree_map_only(LazyTensor, lambda v: None if _is_wide(v, widths) else v, output)
    if not _is_wide(_field(output, "logits"), widths):
        return output
    try:
        return _emptied(copy.copy(output))
    except (AttributeError, TypeError):
        return output


def _emptied(output: Any) -> Any:
    if isinstance(output, dict):
        output["logits"] = None
    else:
        object.__setattr__(output, "logits", None)  # of a frozen dataclass, too
    return output


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _is_wide(logits: Any, widths: set[int]) -> bool:
    return isinstance(logits, LazyTensor) and logits.shape[-1] in widths
