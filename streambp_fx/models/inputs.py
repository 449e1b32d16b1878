"""What is odd about the inputs of a training step, in the words of the model's interface.

The interface is that of a causal language model of transformers: `input_ids` or `inputs_embeds`, and
`attention_mask`, `position_ids` and `labels` that fit them. What is odd is not yet wrong: the model decides.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from ..dynamo.messages import INTEGERS, add_note
from ..errors import InputError, StreamBPError
from ..units import did_you_mean
from .arguments import Arguments, signature_of
from .nested_models import is_of_transformers

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
    if has_both(given):
        return {}  # some models take both, others say so
    if ids is not None:
        if ids.dtype not in INTEGERS:
            odd["input_ids"] = f"{_seen('input_ids', ids)}; expected token ids, int64 or int32"
        elif ids.dim() < 2 or (ids.dim() > 2 and _is_causal_lm(type(model).__name__)):
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


def check_values(given: Arguments, model: nn.Module) -> None:
    """Refuse inputs on the meta device for a model that has weights.

    Some ops read memory that such an input does not have, and go on with whatever is there.

    Args:
        given: arguments of the call.
        model: any model.

    Raises:
        InputError: there are some.
    """
    names = [n for n, v in given.tensors() if v.is_meta]
    if not names or all(p.is_meta for p in model.parameters()):
        return
    raise InputError(
        f"{', '.join(names)} of {type(model).__name__} is on the meta device and has no values, so no step "
        "runs. Give tensors with values, on the device of the weights"
    )


def has_both(given: Arguments) -> bool:
    """True if tokens are given as ids and as embeddings, which some models take and others refuse."""
    return given.get("input_ids") is not None and given.get("inputs_embeds") is not None


def lacks_tokens(given: Arguments, model: nn.Module) -> bool:
    """True if a model that takes ids is given neither ids nor embeddings, under these names."""
    takes = "input_ids" in signature_of(model, model.forward).parameters
    return takes and given.get("input_ids") is None and given.get("inputs_embeds") is None


def _when_refused(given: Arguments, model: nn.Module) -> Iterator[str]:
    """What may be the matter with inputs that a model has refused; others take such."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    known = list(signature_of(model, model.forward).parameters)
    for name in given.keywords if lacks_tokens(given, model) else ():
        hint = "" if name in known else did_you_mean(name, [n for n in known if given.get(n) is None])
        if hint:
            yield f"{name} is no argument of {type(model).__name__}.forward.{hint}"
    if has_both(given):
        yield "both input_ids and inputs_embeds are given; expected one of them"
        return
    tokens = ids if ids is not None else embeds
    for name in INPUTS:
        value = given.get(name)
        if value is not None and not isinstance(value, Tensor):
            yield f"{name} is of type {type(value).__name__}; expected a tensor, {EXPECTED[name]}"
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            yield f"{_seen(name, value)}; expected a dense tensor, {EXPECTED[name]}"
            return
    if isinstance(tokens, Tensor) and tokens.dim() >= 2:
        yield from _shapes_when_refused(given, tokens)
    for name in ("num_items_in_batch", "logits_to_keep"):
        if isinstance(given.get(name), (str, float, list)):
            yield f"{name} is {given.get(name)!r}; expected a whole number or a tensor"
    kept, labels = given.get("logits_to_keep"), given.get("labels")
    if isinstance(labels, Tensor) and (isinstance(kept, Tensor) or (isinstance(kept, int) and kept > 0)):
        which = f"tensor {tuple(kept.shape)}" if isinstance(kept, Tensor) else kept
        yield (
            f"logits_to_keep is {which}, and there are labels of {labels.shape[-1]} tokens; expected one of "
            "them, since the loss needs logits of all tokens (rows without a label cost little)"
        )
    table = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(table, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        yield from _of_the_table(given, weight)


def _shapes_when_refused(given: Arguments, tokens: Tensor) -> Iterator[str]:
    batch, length = tokens.shape[:2]
    if 0 in (batch, length):
        yield f"there are {batch} sequences of {length} tokens; expected one token or more"
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if isinstance(positions, Tensor) and tuple(positions.shape) not in ((1, length), (batch, length)):
        yield f"{_seen('position_ids', positions)}; expected (batch, tokens) = ({batch}, {length})"
    if isinstance(positions, Tensor) and positions.dtype not in INTEGERS:
        yield f"{_seen('position_ids', positions)}; expected positions, int64"
    if isinstance(mask, Tensor) and mask.dim() == 4 and not _is_mask_of(mask, batch, length):
        yield (
            f"{_seen('attention_mask', mask)}; expected a row and a column for each token, 1 or all heads, "
            f"({batch}, 1, {length}, {length}), bool or of the dtype of the weights"
        )


def _is_mask_of(mask: Tensor, batch: int, length: int) -> bool:
    """True if it has the shape of a mask, one for all heads, and its dtype."""
    known = mask.dtype is torch.bool or mask.is_floating_point()
    return known and mask.shape[2:] == (length, length) and mask.shape[0] in (1, batch) and mask.shape[1] == 1


def _of_the_table(given: Arguments, weight: Tensor) -> Iterator[str]:
    """What does not fit the table of embeddings: (tokens known, hidden size)."""
    known, width = weight.shape
    embeds = given.get("inputs_embeds")
    if isinstance(embeds, Tensor) and embeds.shape[-1] != width:
        yield f"{_seen('inputs_embeds', embeds)}; expected a hidden size of {width}"
    elif isinstance(embeds, Tensor) and embeds.dtype != weight.dtype:
        dtype = str(weight.dtype).removeprefix("torch.")
        yield f"{_seen('inputs_embeds', embeds)}; expected {dtype}, as the weights are"
    for name, words in (("input_ids", "token ids"), ("labels", "-100 or token ids")):
        value = given.get(name)
        if not isinstance(value, Tensor) or value.numel() == 0 or value.dtype not in INTEGERS:
            continue
        odd = (value >= known) | ((value < 0) & ((value != -100) | (name == "input_ids")))
        if bool(odd.any()):
            yield f"{name} holds {int(value[odd][0])}; expected {words} from 0 to {known - 1}"


def _may_be_other(name: str, value: Any) -> bool:
    """A mask may come by kind of attention, as a dictionary or an object of its own."""
    return name == "attention_mask" and not isinstance(value, (str, bytes, int, float, list, tuple))


@functools.lru_cache(maxsize=256)
def _is_causal_lm(name: str) -> bool:
    """True for the name of a causal language model of transformers, whose labels are tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _seen(name: str, value: Tensor) -> str:
    kind = "" if value.layout is torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
    return f"{name} is {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{kind}"


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
        odd = list(complaints(given, model).values()) or _matters(given, model)
        seen = [_seen(n, v) for n, v in given.tensors()]
        _note(error, model, odd or [", ".join(seen) or "no tensors"])
        raise


@contextlib.contextmanager
def explained_by_values(given: Arguments, model: nn.Module) -> Iterator[None]:
    """Within: an error of a kernel gets a note if values of the inputs do not fit the model.

    Args:
        given: arguments of the call.
        model: a model of transformers.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        ours = isinstance(error, (StreamBPError, torch.OutOfMemoryError, TorchDynamoException))
        odd = [] if ours else _matters(given, model)
        if odd:
            _note(error, model, odd)
        raise


def _note(error: Exception, model: nn.Module, words: list[str]) -> None:
    add_note(error, f"streambp_fx: the inputs of {type(model).__name__}: {'; '.join(words)}")


def what_does_not_fit(model: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """What is the matter with keyword arguments of a model's forward; None: nothing that is known.

    Args:
        model: any model; the interface is known of those of transformers.
        batch: the keyword arguments.
    """
    given = Arguments.of_call(model, model.forward, (), dict(batch))
    if given is None:
        names = ", ".join(map(repr, batch)) or "none at all"
        return f"the arguments ({names}) do not fit the signature {signature_of(model, model.forward)}"
    if not is_of_transformers(model, model.forward):
        return None
    return "; ".join(complaints(given, model).values() or _matters(given, model)) or None


def _matters(given: Arguments, model: nn.Module) -> list[str]:
    """What may be the matter with refused inputs; nothing where the device cannot be asked any more."""
    try:
        return list(_when_refused(given, model))
    except RuntimeError:
        return []


def raise_its_own_error(given: Arguments, model: nn.Module, forward: Callable[..., Any]) -> None:
    """Raise the error that a model raises of inputs, with a note, if it raises one.

    NOTE [errors of the model]: what a model says of inputs that do not fit it is the right thing to say;
    that the same inputs cannot be captured either is not. It is asked without gradients, for the memory,
    and again with them if it fails so: a model may need them (`register_hook` of a hidden state).

    Args:
        given: arguments of the call.
        model: the model.
        forward: its own forward, which is called with them.
    """
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    for differentiated in (False, True):
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(differentiated):
            try:
                with explained(given, model):
                    forward(*given.positional.values(), **given.keywords)
            except torch.OutOfMemoryError:
                return
            except Exception:
                if differentiated:
                    raise
            else:
                return
