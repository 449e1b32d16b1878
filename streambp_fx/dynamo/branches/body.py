"""What the body of a branch may do: compute. See NOTE [branches on data] in `passes.graph.ops.branch`.

Dynamo keeps what a forward does to Python objects, and does it behind the graph, whatever a tensor says. So a
body that does something to one is no body that can always be run. What it does to tensors is in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.functions import NestedUserFunctionVariable

from ..loops.closed import NotClosed, Unchanged
from .rewriting import PREFIX

_BODY = re.compile(rf"{PREFIX}\d+_body")


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
    effects = parent.output.side_effects
    before, numbers = Unchanged(body, effects, strict=False), _random_numbers()
    found = traced()
    before.refuse_changes()
    if _random_numbers() != numbers:
        raise NotClosed("it draws random numbers of Python's")
    return found


def _random_numbers() -> int:
    """How many random numbers of Python's own the frame has drawn."""
    return len(getattr(InstructionTranslator.current_tx(), "random_calls", ()))
