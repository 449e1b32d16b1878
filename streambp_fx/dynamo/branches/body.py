"""What the body of a branch may do: compute. See NOTE [branches on data] in `passes.graph.ops.branch`.

Dynamo keeps what a forward does to Python objects, and does it behind the graph, whatever a tensor says. So a
body that does something to an object that it has not made is no body that can always be run. What it does to
tensors is in the graph.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo import variables as kinds
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import MutationType
from torch._dynamo.variables.functions import BaseUserFunctionVariable, NestedUserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.user_defined import UserDefinedVariable

from ..loops.closed import FIXED, NUMBERS, NotClosed, captured_by
from ..loops.inlining import has_name
from .rewriting import PREFIX

_BODY = re.compile(rf"{PREFIX}\d+_body")
_SERIAL = "_streambp_serial"
KNOWN = (*NUMBERS, *FIXED, UserDefinedVariable, BaseUserFunctionVariable, kinds.UserMethodVariable)
_serials = itertools.count()
# The serial number from which on objects are made in the body that is traced; None outside of bodies.
_made_from: ContextVar[int | None] = ContextVar("branch_body", default=None)


def is_body(function: Any) -> bool:
    """True for the body of a branch on data."""
    return has_name(function, _BODY)


def in_body(parent: Any, body: Any, traced: Callable[[], Any]) -> Any:
    """Trace the body of a branch.

    Args:
        parent: Dynamo's translator of the function that it stands in.
        body: what Dynamo knows of it.
        traced: traces it.

    Raises:
        NotClosed: it changes something that is no tensor, or may do so.
    """
    _refuse_iterators(body, parent.output.side_effects)
    before = _random_numbers(), _modes()
    token = _made_from.set(next(_serials))
    try:
        found = traced()
    finally:
        _made_from.reset(token)
    if (_random_numbers(), _modes()) != before:
        raise NotClosed("it draws random numbers of Python's, or leaves PyTorch in another mode")
    return found


def _modes() -> tuple[object, ...]:
    """Settings of PyTorch that a function may leave changed."""
    autocast = [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast


def _refuse_iterators(body: Any, effects: SideEffects) -> None:
    """What a body refers to must not remember where it is: iterators and generators do.

    Raises:
        NotClosed: something may.
    """
    pending, seen = [body], set[int]()
    while pending:
        value = pending.pop()
        value = value.realize() if isinstance(value, kinds.LazyVariableTracker) else value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, NestedUserFunctionVariable):
            pending += captured_by(value, effects)
        elif isinstance(value, BaseListVariable):
            pending += value.items
        elif isinstance(value, kinds.ConstDictVariable):
            pending += value.items.values()
        elif not isinstance(value, KNOWN) and not value.is_python_constant():
            raise NotClosed(f"it reads a value that may change ({type(value).__name__})")


def _random_numbers() -> int:
    """How many random numbers of Python's own the frame has drawn."""
    return len(getattr(InstructionTranslator.current_tx(), "random_calls", ()))


def watch_effects() -> None:
    """From now on what is done to Python objects within a body is looked at.

    Dynamo tells its record of effects of each change of an object before it is made: of those that are
    there before the forward, and of those that the forward makes, which are numbered here.
    """
    if hasattr(MutationType, _SERIAL):
        return
    setattr(MutationType, _SERIAL, -1)
    init = MutationType.__init__

    @functools.wraps(init)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        object.__setattr__(self, _SERIAL, next(_serials))

    MutationType.__init__ = numbered  # type: ignore[method-assign]
    for name in ("mutation", "store_attr", "register_hook"):
        setattr(SideEffects, name, _looked_at(getattr(SideEffects, name)))


def _looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def changed(self: SideEffects, item: Any, *args: Any, **kwargs: Any) -> Any:
        first = _made_from.get()
        if first is not None and not _is_made_here(item, first):
            raise NotClosed(f"a branch changes an object ({type(item).__name__})")
        return original(self, item, *args, **kwargs)

    return changed


def _is_made_here(item: Any, first: int) -> bool:
    """True for an object that the forward makes, and that it has made within the body."""
    kind = getattr(item, "mutation_type", None)
    new = kind is not None and type(kind).__name__.endswith("New")
    return new and getattr(kind, _SERIAL, -1) > first
