"""What the arguments of a training step mean for streaming it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .errors import StreamBPWarning

# Arguments that make transformers install hooks while it runs, which Dynamo cannot capture.
EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions")
DOCUMENTS_MEET = (
    "position_ids start again, as in a packed batch, and the model's config has use_cache=True. transformers "
    "then lets the documents attend to each other, streamed or not. To keep them apart, and to save the "
    "memory of the cache: use_cache=False as an argument, or model.config.use_cache = False."
)


def cannot_be_streamed(inputs: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Names of what the caller, or the model's config, asks for and a streamed step does not give."""
    config = getattr(model, "config", None)
    asked = [n for n in EXTRA_OUTPUTS if inputs.get(n, getattr(config, n, False))]
    return ["past_key_values", *asked] if inputs.get("past_key_values") is not None else asked


def without_cache(inputs: dict[str, Any], model: nn.Module, signature: inspect.Signature) -> None:
    """Ask for no cache where none was asked for, as gradient checkpointing does: nobody reads it in training.

    NOTE [packed batches with a cache]: without a mask, transformers keeps documents apart whose positions
    start again, but only if there is no cache. A streamed step is the unstreamed one also in that: it then
    keeps the cache of the config, with a warning.

    Args:
        inputs: arguments of the call by name; `use_cache` is added.
        model: the model.
        signature: of its forward.
    """
    if "use_cache" in inputs or inputs.get("past_key_values") is not None:
        return
    if not _takes_cache(model, signature):
        return
    if _documents_meet(inputs, model):
        warnings.warn(DOCUMENTS_MEET, StreamBPWarning, stacklevel=6)
        return
    inputs["use_cache"] = False


def _takes_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    """True if the forward, or one that it passes its keywords on to (an adapter's), takes `use_cache`."""
    passes_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    configured = hasattr(getattr(model, "config", None), "use_cache")
    return "use_cache" in signature.parameters or (passes_on and configured)


def _documents_meet(inputs: Mapping[str, Any], model: nn.Module) -> bool:
    """True if the config asks for a cache that changes what a packed batch means."""
    positions, masked = inputs.get("position_ids"), inputs.get("attention_mask") is not None
    if masked or positions is None or not getattr(getattr(model, "config", None), "use_cache", False):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def numbers_as_tensors(inputs: dict[str, Any], signature: inspect.Signature) -> None:
    """Numbers that come as extra keywords (a token count) change every step: as tensors they may.

    The model's own named arguments stay as they are.
    """
    for name, value in inputs.items():
        if name not in signature.parameters and type(value) in (int, float):
            inputs[name] = torch.tensor(value)
