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

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import MutationType
from torch._dynamo.variables.functions import NestedUserFunctionVariable

from ..loops.closed import NotClosed
from .rewriting import PREFIX

_BODY = re.compile(rf"{PREFIX}\d+_body")
_SERIAL = "_streambp_serial"
_serials = itertools.count()
# The serial number from which on objects are made in the body that is traced; None outside of bodies.
_made_from: ContextVar[int | None] = ContextVar("branch_body", default=None)


def is_body(function: Any) -> bool:
    """True for the body of a branch on data."""
    return isinstance(function, NestedUserFunctionVariable) and bool(
        _BODY.fullmatch(function.get_code().co_name)
    )


def in_body(parent: Any, body: Any, traced: Callable[[], Any]) -> Any:
    """Trace the body of a branch.

    Args:
        parent: Dynamo's translator of the function that it stands in.
        body: what Dynamo knows of it.
        traced: traces it.

    Raises:
        NotClosed: it changes something that is no tensor, or may do so.
    """
    numbers = _random_numbers()
    token = _made_from.set(next(_serials))
    try:
        found = traced()
    finally:
        _made_from.reset(token)
    if _random_numbers() != numbers:
        raise NotClosed("it draws random numbers of Python's")
    return found


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
