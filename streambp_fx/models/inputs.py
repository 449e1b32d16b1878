"""What is odd about the inputs of a training step, in the words of the model's interface.

The interface is that of a causal language model of transformers: `input_ids` or `inputs_embeds`, and
`attention_mask`, `position_ids` and `labels` that fit them. What is odd is not yet wrong: the model decides.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Arguments

EXPECTED = {
    "input_ids": "int64 (batch, tokens)",
    "inputs_embeds": "(batch, tokens, hidden size)",
    "attention_mask": "(batch, tokens)",
    "position_ids": "int64 (batch, tokens)",
    "labels": "int64 (batch, tokens)",
}
INPUTS = tuple(EXPECTED)


def complaints(given: Arguments, model: nn.Module) -> dict[str, str]:
    """What is odd about the inputs, a sentence each, by the name of the argument.

    It asks for types, shapes and dtypes and never for values, which costs some microseconds.

    Args:
        given: arguments of the call.
        model: a model of transformers.
    """
    odd: dict[str, str] = {}
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    for name in INPUTS:
        value = given.get(name)
        if value is not None and not isinstance(value, Tensor) and not _may_be_other(name, value):
            odd[name] = f"{name} is of type {type(value).__name__}; expected a tensor, {EXPECTED[name]}"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or odd:
        return odd
    if ids is None and embeds is None:
        others = [n for n, _ in given.tensors() if n not in INPUTS]
        return {} if others else {"input_ids": "there are no tokens; expected input_ids or inputs_embeds"}
    if ids is not None and embeds is not None:
        return {}  # some models take both, others say so
    if ids is not None:
        if ids.dtype not in (torch.int64, torch.int32):
            odd["input_ids"] = f"{_seen('input_ids', ids)}; expected token ids, int64 or int32"
        elif ids.dim() < 2:
            odd["input_ids"] = f"{_seen('input_ids', ids)}; expected (batch, tokens)"
    elif embeds.dim() != 3:
        odd["inputs_embeds"] = f"{_seen('inputs_embeds', embeds)}; expected (batch, tokens, hidden size)"
    tokens = ids if ids is not None else embeds
    if odd or tokens.dim() < 2:
        return odd
    return _that_do_not_fit(given, model, "input_ids" if ids is not None else "inputs_embeds", tokens)


def _that_do_not_fit(given: Arguments, model: nn.Module, name: str, tokens: Tensor) -> dict[str, str]:
    """Inputs beside the tokens whose shape does not fit them."""
    odd, (batch, length) = {}, tokens.shape[:2]
    like = f"(batch, tokens) = ({batch}, {length}), as {name} has"
    mask = given.get("attention_mask")
    cached = given.get("past_key_values") is not None or given.get("cache") is not None
    if isinstance(mask, Tensor) and not cached:
        if mask.dim() == 2 and mask.shape != (batch, length):
            odd["attention_mask"] = f"{_seen('attention_mask', mask)}; expected {like}"
        elif mask.dim() not in (2, 4):
            odd["attention_mask"] = f"{_seen('attention_mask', mask)}; expected {like}, or 4 dims"
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and (positions.dim() == 0 or positions.shape[-1] != length):
        seen = _seen("position_ids", positions)
        odd["position_ids"] = f"{seen}; expected as many tokens as {name} has: {length}"
    labels = given.get("labels")
    if labels is not None and _is_causal_lm(type(model).__name__):
        if labels.dtype != torch.int64:
            odd["labels"] = f"{_seen('labels', labels)}; expected token ids, int64 {like}"
        elif labels.shape != (batch, length):
            odd["labels"] = f"{_seen('labels', labels)}; expected {like}"
    return odd


def _more(given: Arguments, model: nn.Module) -> dict[str, str]:
    """What some models take, and this one may have refused."""
    embeds, table = given.get("inputs_embeds"), getattr(model, "get_input_embeddings", lambda: None)()
    if embeds is None:
        return {}
    if given.get("input_ids") is not None:
        return {"inputs_embeds": "both input_ids and inputs_embeds are given; expected one of them"}
    width = getattr(table, "embedding_dim", embeds.shape[-1])
    if embeds.shape[-1] == width:
        return {}
    return {"inputs_embeds": f"{_seen('inputs_embeds', embeds)}; expected a hidden size of {width}"}


def _may_be_other(name: str, value: Any) -> bool:
    """A mask may come by kind of attention, as a dictionary or an object of its own."""
    return name == "attention_mask" and not isinstance(value, (str, bytes, int, float, list, tuple))


@functools.lru_cache(maxsize=256)
def _is_causal_lm(name: str) -> bool:
    """True for the name of a causal language model of transformers, whose labels are tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _seen(name: str, value: Tensor) -> str:
    return f"{name} is {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


@contextlib.contextmanager
def explained(given: Arguments, model: nn.Module) -> Iterator[None]:
    """Within: an error of the model gets a note of what it was given, and of what is odd about that.

    Args:
        given: arguments of the call.
        model: the model.
    """
    try:
        yield
    except Exception as error:
        odd = complaints(given, model) or _more(given, model)
        seen = [_seen(n, v) for n, v in given.tensors()]
        words = list(odd.values()) or [", ".join(seen) or "no tensors"]
        _add_note(error, f"streambp_fx: the inputs of {type(model).__name__}: {'; '.join(words)}")
        raise


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)
