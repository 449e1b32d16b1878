"""What the body of a branch may do: compute. See NOTE [branches on data] in `passes.graph.ops.branch`.

Dynamo keeps what a forward does to Python objects, and does it behind the graph, whatever a tensor says. So a
body that does something to an object that it has not made is no body that can always be run. What it does to
tensors is in the graph.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch._dynamo import variables as kinds
from torch._dynamo.exc import ObservedException
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import MutationType, VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable, NestedUserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.user_defined import UserDefinedVariable
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...versions.differences import GET_NEXT
from ..loops.closed import FIXED, NUMBERS, NotClosed, captured_by
from ..loops.inlining import has_name
from .rewriting import PREFIX

_BODY = re.compile(rf"{PREFIX}\d+_body")
_SERIAL = "_streambp_serial"
# Methods of what Dynamo knows of iterators that move them on, beside that of `next`.
MOVING = ("call_method", "unpack_var_sequence", "force_unpack_var_sequence", "force_apply_to_var_sequence")
KNOWN = (*NUMBERS, *FIXED, UserDefinedVariable, BaseUserFunctionVariable, kinds.UserMethodVariable)
_serials = itertools.count()
# Serial numbers of iterators made in the bodies that are traced, by `id`.
_iterators_of_bodies: dict[int, int] = {}
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
        NotClosed: it changes something that is no tensor, or may do so, or raises an error.
    """
    _refuse_iterators(body, parent.output.side_effects)
    before, numbers = (_random_numbers(), _modes()), _known_of_numbers(parent.output.shape_env)
    token = _made_from.set(next(_serials))
    try:
        found = traced()
    except ObservedException as error:  # which the function around it may catch
        raise NotClosed(f"it raises an error ({type(error).__name__})") from error
    finally:
        _made_from.reset(token)
        if _made_from.get() is None:
            _iterators_of_bodies.clear()
    if (_random_numbers(), _modes()) != before:
        raise NotClosed("it draws random numbers of Python's, or leaves PyTorch in another mode")
    after = _known_of_numbers(parent.output.shape_env)
    if any(after[symbol] != known for symbol, known in numbers.items()):
        raise NotClosed("it asserts something about a number, which holds where it is run")
    return found


def _known_of_numbers(shape_env: ShapeEnv) -> dict[sympy.Symbol, tuple[Any, ...]]:
    """What is taken for granted of each number, of rows and of other sizes, that the trace has met."""
    asserted = shape_env.deferred_runtime_asserts
    return {
        symbol: (within, shape_env.replacements.get(symbol), len(asserted.get(symbol, ())))
        for symbol, within in shape_env.var_to_range.items()
    }


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
        setattr(SideEffects, name, _looked_at(getattr(SideEffects, name), place=1))
    for kind in _iterators(VariableTracker):  # which change without telling
        for name in (GET_NEXT, *MOVING):
            if name in vars(kind):
                setattr(kind, name, _looked_at(getattr(kind, name), place=0))
        if "__init__" in vars(kind):
            kind.__init__ = _noted(kind.__init__)  # type: ignore[misc]


def _iterators(kind: type) -> Iterator[type]:
    """What Dynamo knows of iterators and generators; those that somebody has written are other objects."""
    own: type
    for own in kind.__subclasses__():
        if not issubclass(own, (UserDefinedVariable, kinds.LazyVariableTracker)):  # that asks another one
            if any(GET_NEXT in vars(c) for c in own.__mro__ if c is not VariableTracker):
                yield own
            yield from _iterators(own)


def _looked_at(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A method that changes an object, which is at one place of its arguments."""

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        first = _made_from.get()
        if first is not None and not _is_made_here(args[place], first):
            raise NotClosed(f"a branch changes an object ({type(args[place]).__name__})")
        return original(*args, **kwargs)

    return changed


def _noted(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        if _made_from.get() is not None:
            _iterators_of_bodies[id(self)] = next(_serials)
        init(self, *args, **kwargs)

    return noted


def _is_made_here(item: Any, first: int) -> bool:
    """True for an object that the forward makes, and that it has made within the body."""
    if item.source is None and _iterators_of_bodies.get(id(item), -1) > first:
        return True
    kind = getattr(item, "mutation_type", None)
    new = kind is not None and type(kind).__name__.endswith("New")
    return new and getattr(kind, _SERIAL, -1) > first
