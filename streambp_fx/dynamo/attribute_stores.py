"""Attributes that a model sets behind a part of the graph that is captured by itself.

NOTE [attributes set behind a region]: Dynamo goes on with a copy of what it knows of Python objects when it
has captured such a part (the body of a `scan`). In PyTorch 2.13 and 2.14 what it keeps of the `__dict__` of
an object goes on with the original: an attribute that is set before the part and behind it keeps the first
value, and nothing is said. What is kept asks for the copy here. From 2.15 on it does so by itself.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import dicts

from .this_backend import is_ours


class _Current:
    """In the place of the attribute `side_effects`: that of the trace, and not that of the beginning."""

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["side_effects"] = value

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        first = vars(owner)["side_effects"]
        output = first.output_graph_weakref()
        return first if output is None or not is_ours(output.compiler_fn) else output.side_effects


def keep_attribute_stores() -> None:
    """From now on attributes that are set behind a region are set, in what is traced for this backend."""
    kept = getattr(dicts, "SideEffectsProxyDict", None)  # before 2.13 there is none
    if kept is not None and "side_effects" not in vars(kept):  # it is ours already, or PyTorch's from 2.15 on
        kept.side_effects = _Current()
