"""Copies of functions: of the same code, and unknown to whoever replaces the function itself."""

from __future__ import annotations

import types
from typing import Any


def copy_of(function: types.FunctionType, names: dict[str, Any] | None = None) -> types.FunctionType:
    """A function with the same code, defaults and closure.

    Args:
        function: of a module of Python code.
        names: what its global names mean; None: the same. Dynamo looks for them in a module if there is a
            `__name__` among them.
    """
    given = function.__globals__ if names is None else names
    made = types.FunctionType(
        function.__code__, given, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
