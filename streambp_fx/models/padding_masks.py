"""Masks of FlexAttention as transformers makes them: with the padding whatever the padding says.

transformers leaves the padding out of the mask function where no token is padding. Which it is, is asked of
the tensor, and a graph cannot branch on that. A mask function with a padding of ones says the same, so while
Dynamo traces for this project the question is not asked. Nor is `create_block_mask` asked to compile itself:
it would warn that this is not necessary, and a graph cannot do that either.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from ..dynamo.copied_functions import copy_of
from ..dynamo.this_backend import is_traced_for_us

QUESTION = "fast_all"  # the name by which transformers asks if all elements of a mask are true
CREATION = "create_block_mask"


def trace_padding_masks() -> None:
    """Let Dynamo trace models whose FlexAttention has a mask of padding."""
    make = getattr(importlib.import_module("transformers.masking_utils"), "flex_attention_mask", None)
    if isinstance(make, types.FunctionType) and {QUESTION, CREATION} & set(make.__code__.co_names):
        _trace(make)


def unknown(mask: Tensor) -> bool:
    """In place of the question if all elements of a mask, bool of any shape, are true: some may not be."""
    return False


def traced(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
    """`create_block_mask`, as a part of the graph that is being traced."""
    return create_block_mask(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def _trace(make: types.FunctionType) -> None:
    same = copy_of(make)
    # without its name Dynamo does not look for the globals in the module of that name
    names = {k: v for k, v in make.__globals__.items() if k != "__name__"}
    names |= {QUESTION: unknown, CREATION: traced}
    padded = copy_of(make, names)

    def stands_in(*args: Any, **kwargs: Any) -> Any:
        return padded(*args, **kwargs) if is_traced_for_us() else same(*args, **kwargs)

    torch._dynamo.substitute_in_graph(make, skip_signature_check=True)(stands_in)
