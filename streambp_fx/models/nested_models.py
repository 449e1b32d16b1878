"""Models within models, and forwards that other people put over a model's own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as modules
from transformers import PreTrainedModel

from .plain_forms import has_plain_form


def caller_of_forward() -> nn.Module | None:
    """The module that is called, if `nn.Module` itself calls the function that asks, as the module's forward.

    A forward in the attributes of a module is given no module: a shallow copy of the module has it as well.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals is vars(modules) else None


def is_of_transformers(model: nn.Module, forward: Any) -> bool:
    """True for a model of transformers, or one in an adapter, with a forward of theirs: arguments that are
    called as in transformers mean the same in it. What others mean by them is theirs.
    """
    adapted = getattr(model, "get_base_model", None)
    base = adapted() if adapted is not None and hasattr(model, "peft_config") else model
    theirs = ("transformers.", "peft.")
    forwards = (_innermost(forward), _innermost(base.forward))
    return isinstance(base, PreTrainedModel) and all(f.__module__.startswith(theirs) for f in forwards)


def _innermost(forward: Any) -> Any:
    """What a forward says that it wraps, as accelerate's does, which casts the outputs."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def models_within(model: nn.Module) -> list[nn.Module]:
    """Models that `model` is made of: its backbone, or the model that an adapter wraps and its backbone."""
    parts = (m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))
    return [m for m in parts if "input_ids" in _parameters(type(m).forward, True)]


def switched_by_others(model: nn.Module, forward: Any, given: Mapping[str, Any]) -> bool:
    """True if the call asks for a forward that somebody put over the model's, or over one within it.

    NOTE [forwards of others]: such a forward computes what it likes of the backbone's output, so the model
    cannot be taken for one graph from ids to loss. It shows by a switch: a keyword that is True, and that
    the wrapper has and the class it wraps has not. Not so where the wrapper is known to be captured: then
    the graph is from ids to its loss.

    Args:
        model: the model.
        forward: its forward below the streamed one.
        given: keywords of the call.
    """
    switches = {name for name, value in given.items() if value is True}
    if not switches:
        return False
    within = [(m, vars(m)["forward"]) for m in models_within(model) if "forward" in vars(m)]
    replaced = [(model, forward)] * (not has_plain_form(forward))
    replaced += [(m, f) for m, f in within if not _is_captured(f)]
    return any(switches & _added(type(m), f) for m, f in replaced)


def _is_captured(forward: Any) -> bool:
    """True for a streamed forward of a model within another that has a plain form: only it runs that form."""
    return has_plain_form(getattr(forward, "original", None))


def _added(kind: Any, forward: Any) -> set[str]:
    """Parameters that the functions around `kind.forward` have beside its own."""
    own = _parameters(kind.forward, True)
    return {n for f in _wrappers(forward, kind.forward) for n in _parameters(f, False) if n not in own}


def _wrappers(forward: Any, innermost: Any) -> Iterator[Any]:
    """The functions around `innermost`, outermost first."""
    while forward is not None and getattr(forward, "__func__", forward) is not innermost:
        yield forward
        inner = getattr(forward, "__wrapped__", None) or getattr(forward, "original", None)
        forward = inner if inner is not None else getattr(forward, "__func__", None)


@functools.lru_cache(maxsize=1024)
def _parameters(function: Any, follow: bool) -> tuple[str, ...]:
    """Names of a function's parameters, or (`follow`) of those of the function that it says it wraps."""
    try:
        return tuple(inspect.signature(function, follow_wrapped=follow).parameters)
    except (TypeError, ValueError):
        return ()
