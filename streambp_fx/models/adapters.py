"""PEFT's adapters: what Dynamo cannot trace in them, and which of them change the sequence.

Nothing here imports PEFT: a model that has an adapter has imported it.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import nn

from ..dynamo.copied_functions import copy_of


def lengthens_sequence(model: nn.Module) -> bool:
    """True for an adapter that puts virtual tokens before the sequence (prompt tuning and its like).

    Its wrapper joins them to the embeddings and calls the model, whose sequence is then the longer one. So
    the model within is streamed, and the wrapper runs as it is.
    """
    active = getattr(model, "peft_config", None) and getattr(model, "active_peft_config", None)
    return bool(getattr(active, "is_prompt_learning", False))


def prepare_tracing() -> None:
    """Let Dynamo trace DoRA, if PEFT has been imported."""
    found = sys.modules.get("peft.utils.integrations")
    original = getattr(found, "dequantize_module_weight", None)
    if isinstance(original, types.FunctionType):
        _plain_weights_as_they_are(original)


@functools.lru_cache(maxsize=1)
def _plain_weights_as_they_are(original: types.FunctionType) -> None:
    """NOTE [weights that are not quantised]: PEFT tells them by text operations on the name of their class,
    which Dynamo does not know. In a graph, a plain parameter is returned at once; any other goes to PEFT.
    """
    copied = copy_of(original)

    def weight_of(module: Any) -> Any:
        if type(module.weight) is nn.Parameter and not hasattr(module, "W_q"):
            return module.weight
        return copied(module)

    torch._dynamo.substitute_in_graph(original, skip_signature_check=True)(weight_of)
