"""Gives Dynamo other code for a function that it inlines."""

from __future__ import annotations

import functools
import logging
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._guards import CompileContext

from ..this_backend import MARK, is_ours
from .rewriting import with_scans

log = logging.getLogger(__name__)
# Code whose loops Dynamo could not trace as scans, and the graph for which it was tried.
_refused: set[tuple[CodeType, Any]] = set()


def watch_calls() -> None:
    """From now on loops along rows in functions that are inlined for this backend are traced as scans.

    See NOTE [loops along the sequence]. Where Dynamo fails within one, it begins anew and unrolls it.
    """
    original = InliningInstructionTranslator.inline_call
    if getattr(original, MARK, False):
        return

    @functools.wraps(original)
    def inline_call(cls: Any, parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        made = _with_scans(parent, func)
        if made is None:
            return original(parent, func, *args, **kwargs)
        try:
            return original(parent, made, *args, **kwargs)
        except RestartAnalysis:
            raise
        except TorchDynamoException as error:
            code = func.get_code()
            _refused.add((code, CompileContext.current_compile_id()))
            log.info("the loops of %s are unrolled: %s", code.co_name, error)
            parent.speculation_log.clear()
            raise RestartAnalysis(restart_reason="a loop is no scan") from error

    setattr(inline_call, MARK, True)
    InliningInstructionTranslator.inline_call = classmethod(inline_call)  # type: ignore[assignment, method-assign]


def _with_scans(parent: Any, func: Any) -> Any:
    """What Dynamo knows of a function, with other code; None if nothing changes."""
    if not isinstance(func, UserFunctionVariable) or type(func.fn) is not FunctionType:
        return None
    function = func.fn
    code, names = function.__code__, function.__globals__
    if (function.__module__ or "").split(".")[0] in ("torch", "streambp_fx"):
        return None
    if (code, CompileContext.current_compile_id()) in _refused or not is_ours(parent.output.compiler_fn):
        return None
    if {"range", "enumerate"} & names.keys() or names.get("torch", torch) is not torch:
        return None
    changed = with_scans(code)
    if changed is None:
        return None
    made = FunctionType(changed, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return func.clone(fn=made)
