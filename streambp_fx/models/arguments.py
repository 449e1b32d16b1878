"""What the arguments of a training step mean for streaming it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from ..errors import warn

# Inputs of a Hugging Face causal language model whose last or second dim is the sequence, by name.
SEQUENCE_DIMS = {"inputs_embeds": 1, "input_ids": 1, "attention_mask": 1, "labels": 1, "position_ids": -1}
TOKENS = ("inputs_embeds", "input_ids")
# And of the decoder of a model that has an encoder, too: its tokens are made of the labels if none are given.
DECODER_DIMS = {"decoder_inputs_embeds": 1, "decoder_input_ids": 1, "labels": 1, "decoder_attention_mask": 1}
# Arguments that make transformers install hooks while it runs, which Dynamo cannot capture.
EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions")
DOCUMENTS_MEET = (
    "position_ids start again, as in a packed batch, and the model's config has use_cache=True. transformers "
    "then lets the documents attend to each other, streamed or not. To keep them apart, and to save the "
    "memory of the cache: use_cache=False as an argument, or model.config.use_cache = False."
)


CACHED = (
    "this step returns a cache for generation, since the model's config has use_cache=True, the default of "
    "transformers. So keys and values of all layers are stored, which may take more memory than all the "
    "rest. Set model.config.use_cache = False for training, or give use_cache=False with the inputs."
)


def signature_of(model: nn.Module, forward: Any, follow: bool = True) -> inspect.Signature:
    """Signature of a forward; where that is `*args, **kwargs`, of the class, or of one that it extends.

    Args:
        follow: where a function says that it wraps another, that of the other.
    """
    found = inspect.signature(forward, follow_wrapped=follow)
    for owner in type(model).__mro__:
        if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found.parameters.values()):
            break
        if "forward" in vars(owner) and owner is not nn.Module:
            found = inspect.signature(types.MethodType(vars(owner)["forward"], model))
    return found


@dataclass(frozen=True)
class Arguments:
    """What a caller gave, as it was given: nothing is added to it, left out or moved.

    A whole number of numpy's is one of Python's, which Dynamo would not take for the number that it is.

    Attributes:
        positional: the arguments that were given by position, in their order, by the names that the signature
            has for them. The names are for finding inputs; those of `*args` are numbered.
        keywords: the others.
    """

    positional: dict[str, Any]
    keywords: dict[str, Any]

    @staticmethod
    def of(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a call; None if they do not fit the signature."""
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return None
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [n for n, p in signature.parameters.items() if p.kind in by_position][: len(args)]
        names += [f"*{k}" for k in range(len(names), len(args))]
        positional = {n: _plain(v) for n, v in zip(names, args, strict=True)}
        return Arguments(positional, {n: _plain(v) for n, v in kwargs.items()})

    @staticmethod
    def of_call(model: nn.Module, forward: Any, args: tuple, kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a call of the model's forward; None if they do not fit.

        A wrapper may bind the model itself, and say that it wraps a function that takes it.
        """
        tried = (signature_of(model, forward, follow) for follow in (True, False))
        found = (Arguments.of(signature, args, kwargs) for signature in tried)
        return next((given for given in found if given is not None), None)

    @property
    def names(self) -> frozenset[str]:
        """Of those that are not None."""
        return frozenset(n for n, v in (*self.positional.items(), *self.keywords.items()) if v is not None)

    def get(self, name: str) -> Any:
        """The argument of a name; None where it was not given."""
        return self.positional.get(name, self.keywords.get(name))

    def given(self, name: str) -> bool:
        """True if an argument was given under this name, by position or by keyword."""
        return name in self.positional or name in self.keywords

    def with_keywords(self, **more: Any) -> Arguments:
        """The same arguments, with these keywords added or replaced."""
        return Arguments(self.positional, {**self.keywords, **more})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of any shape and dtype, with the names by which they came; also those in dictionaries."""
        for name, value in (*self.positional.items(), *self.keywords.items()):
            yield from _tensors(name, value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, numpy.integer) else value


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)


def dims_of_sequence(given: Arguments, named: Mapping[str, int], model: nn.Module) -> dict[str, int]:
    """Dims that carry the sequence, by the name of the input.

    NOTE [names are a guess]: an input that is called as in transformers (`SEQUENCE_DIMS`) may be something
    else: labels of a classifier, or of a decoder of its own. It counts where that dim is as long as the
    tokens are. What is said of the inputs here only opens their sizes and finds the sequence among them.

    Args:
        given: the arguments of the call.
        named: what the user said, which is not questioned.
        model: if it has an encoder and a decoder, the sequence is that of the decoder, which the loss reads;
            what the encoder gives is a context.
    """
    known, tokens = SEQUENCE_DIMS, list(TOKENS)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and not named:
        known, tokens = DECODER_DIMS, list(DECODER_DIMS)
    dims = {**known, **named}
    lengths = [
        (name, value.shape[dims[name]])
        for name, value in given.tensors()
        if name in dims and -value.dim() <= dims[name] < value.dim() and not _is_of_scores(name, value)
    ]
    first = next((size for name, size in lengths if name in (list(named) or tokens)), None)
    alike = {name for name, size in lengths if size == first}
    return {name: dim for name, dim in dims.items() if name in alike or name in named}


def open_dims(name: str, value: torch.Tensor, dims: Mapping[str, int]) -> set[int]:
    """Dims of an input whose sizes may be others in the next call: the sequence, and the batch before it.

    Args:
        name: of the input.
        value: the input.
        dims: those that carry the sequence, by name (`dims_of_sequence`).
    """
    if _is_of_scores(name, value):
        found = {0, value.dim() - 2, value.dim() - 1}
    elif name in dims and value.dim() > 1:
        dim = dims[name] % value.dim()
        found = {0, 1} if dim == 1 else {dim}
    else:
        found = set()
    return {dim for dim in found if value.shape[dim] > 1}


def _is_of_scores(name: str, value: torch.Tensor) -> bool:
    """True for a mask that has a row and a column for each token, and not one number."""
    return name == "attention_mask" and value.dim() > 2


def cannot_be_streamed(given: Arguments, model: nn.Module) -> list[str]:
    """Names of what the caller, or the model's config, asks for and a streamed step does not give."""
    config = getattr(model, "config", None)
    asked = [n for n in EXTRA_OUTPUTS if (given.get(n) if given.given(n) else getattr(config, n, False))]
    return ["past_key_values", *asked] if given.get("past_key_values") is not None else asked


def without_cache(given: Arguments, model: nn.Module, signature: inspect.Signature) -> Arguments:
    """Ask for no cache where none was asked for, as gradient checkpointing does: nobody reads it in training.

    NOTE [packed batches with a cache]: without a mask, transformers keeps documents apart whose positions
    start again, but only if there is no cache. A streamed step is the unstreamed one also in that: it then
    keeps the cache of the config, with a warning.

    Args:
        given: arguments of the call.
        model: the model.
        signature: of its forward.

    Returns:
        the arguments, with `use_cache`.
    """
    if given.get("use_cache") is not None or given.get("past_key_values") is not None:
        return given
    if "use_cache" in given.positional or not _takes_cache(model, signature):
        return given
    if _documents_meet(given, model):
        warn(DOCUMENTS_MEET)
        return given
    return given.with_keywords(use_cache=False)


def warn_of_cache(given: Arguments, model: nn.Module) -> None:
    """Say that a call in training makes a cache, unless the caller has asked for it.

    `torch.compile` traces the call as it is: what it returns is returned, and so it is stored.

    Args:
        given: arguments of the call.
        model: the model.
    """
    asked = given.get("use_cache") is not None or given.get("past_key_values") is not None
    caches = getattr(getattr(model, "config", None), "use_cache", False) is True
    if caches and not asked and model.training and _takes_cache(model, signature_of(model, model.forward)):
        warn(CACHED)


def _takes_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    """True if the forward, or one that it passes its keywords on to (an adapter's), takes `use_cache`."""
    passes_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return "use_cache" in signature.parameters or (
        passes_on and hasattr(getattr(model, "config", None), "use_cache")
    )


def _documents_meet(given: Arguments, model: nn.Module) -> bool:
    """True if the config asks for a cache that changes what a packed batch means."""
    positions, masked = given.get("position_ids"), given.get("attention_mask") is not None
    if masked or positions is None or not getattr(getattr(model, "config", None), "use_cache", False):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def counted(given: Arguments) -> Arguments:
    """The token count that transformers' trainer gives its models changes in every step: as a tensor it may.

    transformers' losses take it as either. Any other number is captured as the number that it is.
    """
    items = given.keywords.get("num_items_in_batch")
    return (
        given.with_keywords(num_items_in_batch=torch.tensor(items, device="cpu"))
        if type(items) is int
        else given
    )
