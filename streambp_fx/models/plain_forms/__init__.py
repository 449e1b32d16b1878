"""Forwards that call kernels of other libraries which cannot be captured: the same forward in plain PyTorch.

NOTE [one global replaced]: nothing of the other library is changed. A function that names such a kernel is
made again from the same code and closure, with globals in which that name means the plain form. Only a
streamed step runs it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from ...dynamo.copied_functions import copy_of
from .trl import PLAIN_FORMS


def in_plain_pytorch(forward: Any) -> Any:
    """The forward with its kernels in plain PyTorch; the forward itself if it names none that is known."""
    forms = _forms(forward)
    if not forms:
        return forward
    function = getattr(forward, "__func__", forward)
    # without its name Dynamo does not look for the globals in the module of that name
    names = {k: v for k, v in function.__globals__.items() if k != "__name__"} | forms
    made = copy_of(function, names)
    return types.MethodType(made, forward.__self__) if isinstance(forward, types.MethodType) else made


def has_plain_form(forward: Any) -> bool:
    """True if `in_plain_pytorch` makes the forward again; without making it."""
    return bool(_forms(forward))


def _forms(forward: Any) -> dict[str, Any]:
    """Plain forms of the globals that a forward names."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType):
        return {}
    known = {}
    for (module, name), form in PLAIN_FORMS.items():
        kernel = getattr(sys.modules.get(module), name, None)
        if kernel is not None:
            known[id(kernel)] = form
    given = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return {name: known[id(value)] for name, value in given if id(value) in known}
