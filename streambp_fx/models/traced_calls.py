"""A call of a model that Dynamo is about to trace: inputs that do not fit are the model's to refuse."""

from __future__ import annotations

from collections.abc import Callable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError

from .arguments import Arguments, warn_of_cache
from .inputs import check_values, complaints, has_both, lacks_tokens, raise_its_own_error
from .nested_models import is_of_transformers


class TracedCall(NamedTuple):
    """A call of the forward of a model whose interface is known."""

    model: nn.Module
    given: Arguments

    def raise_its_own_error(self) -> None:
        """Raise what the model raises of these arguments, if it does."""
        if torch.is_grad_enabled():
            own = getattr(self.model.forward, "original", self.model.forward)  # below a streamed forward
            raise_its_own_error(self.given, self.model, own)


def in_the_words_of_the_model(frame: Any, compiled: Callable[[], Any]) -> Any:
    """Compile a frame. Where it is a call of a model with inputs that do not fit it, raise the model's error.

    NOTE [inputs that cannot be traced]: Dynamo would say at which op of the model fake tensors failed. The
    model is asked before it is traced if something about the inputs is odd, and else if tracing fails.

    Args:
        frame: as Dynamo hands it over.
        compiled: compiles it.

    Raises:
        InputError: inputs are on the meta device, and weights are not.
    """
    call = _call_of(frame)
    if call is not None:
        check_values(call.given, call.model)
        odd = has_both(call.given) or lacks_tokens(call.given, call.model)
        if odd or complaints(call.given, call.model):
            call.raise_its_own_error()
    try:
        found = compiled()
        if call is not None and torch.is_grad_enabled():
            warn_of_cache(call.given, call.model)
        return found
    except Exception as error:
        failed = error
    if call is not None and _may_be_due_to_inputs(failed):
        call.raise_its_own_error()
    raise failed


def _may_be_due_to_inputs(error: Exception) -> bool:
    """True for an error that running the model may raise; the others are Dynamo's, or ours."""
    if isinstance(error, TorchRuntimeError):
        return True
    kinds = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
    return isinstance(error, kinds) and not isinstance(error, (ShortenTraceback, TorchDynamoException))


def _call_of(frame: Any) -> TracedCall | None:
    """The call that a frame is, if it is one of the forward of a model of transformers, or what wraps it."""
    code, values = frame.f_code, frame.f_locals
    positions, both = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, rest = list(code.co_varnames[:both]), list(code.co_varnames[both:])
    args = values.get(rest.pop(0), ()) if code.co_flags & CO_VARARGS else ()
    more = values.get(rest.pop(0), {}) if code.co_flags & CO_VARKEYWORDS else {}
    if not all(n in values for n in names):
        return None
    first = [values[n] for n in names[:positions]] + list(args)
    if not first or not isinstance(first[0], nn.Module):
        return None
    model = first[0]
    forward = vars(model).get("forward", type(model).forward)
    if not _is_code_of(code, forward) or not is_of_transformers(model, model.forward):
        return None
    # By name where that is possible, as functions around a forward expect its arguments.
    by_position = first[1:] if args else []
    by_name = {n: values[n] for n in names[positions if args else 1 :]}
    given = Arguments.of_call(model, model.forward, tuple(by_position), {**by_name, **more})
    return None if given is None else TracedCall(model, given)


def _is_code_of(code: CodeType, forward: Any) -> bool:
    """True if a function, or one that it says it wraps, has this code."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if getattr(function, "__code__", None) is code:
            return True
        forward = getattr(function, "__wrapped__", None)
    return False
