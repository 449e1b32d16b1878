"""Gives Dynamo other code for a function that it inlines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._guards import CompileContext

from ..this_backend import MARK, is_ours
from .rewriting import with_scans


@dataclass
class _Trace:
    """The graph that is being traced, how often Dynamo may begin anew.

    Attributes:
        number: Dynamo's of the graph.
        refused: code whose loops could not be traced as scans.
        unrolled: loops that are unrolled, and why.
    """

    number: Any = None
    refused: set[CodeType] = field(default_factory=set)
    unrolled: dict[str, None] = field(default_factory=dict)


_last = _Trace()


def _current() -> _Trace:
    global _last
    number = CompileContext.current_compile_id()
    if _last.number != number:
        _last = _Trace(number)
    return _last


def unrolled_loops() -> list[str]:
    """Loops of the graph that is being traced which are no steps from row to row: file, line and reason."""
    return list(_current().unrolled)


# Whose loops are read, see NOTE [loops along the sequence].
LIBRARIES = {"transformers"}
SCAN = getattr(torch.ops.higher_order, "scan", None)
# What is traced in the place of a function.
_stand_ins: dict[Any, Any] = {}


def stand_in(function: Any, other: Any) -> None:
    """From now on, where `function` is inlined for this backend, another of the same parameters is traced."""
    _stand_ins[function] = other


def watch_calls(refuse: Callable[..., Any]) -> None:
    """From now on loops along rows in functions that are inlined for this backend are traced as scans.

    See NOTE [loops along the sequence]. Where Dynamo fails within one, it begins anew and unrolls it.

    Args:
        refuse: raises an error for a scan that is not to be: given the graph of its body, what is carried, by
            rows, and for all rows.
    """
    original = InliningInstructionTranslator.inline_call
    if getattr(original, MARK, False):
        return

    @functools.wraps(original)
    def inline_call(cls: Any, parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        other = _stand_ins.get(func.fn) if isinstance(func, UserFunctionVariable) else None
        if other is not None and is_ours(parent.output.compiler_fn):
            return original(parent, func.clone(fn=other), *args, **kwargs)
        made = _with_scans(parent, func)
        if made is None:
            return original(parent, func, *args, **kwargs)
        try:
            found = original(parent, made, *args, **kwargs)
            _check(parent.output, refuse)
            return found
        except RestartAnalysis:
            raise
        except Exception as error:
            code, trace = func.get_code(), _current()
            trace.refused.add(code)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            place = f"{code.co_filename}:{code.co_firstlineno}"
            trace.unrolled[f"{place}: it cannot be traced as a scan ({reason})"] = None
            parent.speculation_log.clear()
            raise RestartAnalysis(restart_reason="a loop is no scan") from error

    setattr(inline_call, MARK, True)
    InliningInstructionTranslator.inline_call = classmethod(inline_call)  # type: ignore[assignment, method-assign]


def _check(output: Any, refuse: Callable[..., Any]) -> None:
    """Look at the scans that were traced."""
    for node in output.graph.nodes:
        if node.target is SCAN and not node.meta.get(MARK):
            node.meta[MARK] = True
            body, *given = node.args
            values = torch.fx.node.map_arg(given, lambda n: n.meta["example_value"])
            refuse(output.nn_modules[body.target], *values)


def _with_scans(parent: Any, func: Any) -> Any:
    """What Dynamo knows of a function, with other code; None if nothing changes."""
    if not isinstance(func, UserFunctionVariable) or type(func.fn) is not FunctionType:
        return None
    function = func.fn
    code, names = function.__code__, function.__globals__
    library = (function.__module__ or "").split(".")[0]
    if library in ("torch", "streambp_fx"):
        return None
    if not is_ours(parent.output.compiler_fn) or code in _current().refused:
        return None
    if {"range", "enumerate"} & names.keys() or names.get("torch", torch) is not torch:
        return None
    changed = with_scans(code)
    _current().unrolled.update(dict.fromkeys(changed.unrolled))
    if changed.code is None:
        return None
    if library not in LIBRARIES:
        why = "only loops in the code of transformers are taken for steps"
        _current().unrolled[f"{code.co_filename}:{code.co_firstlineno}: {why}"] = None
        return None
    made = FunctionType(changed.code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return func.clone(fn=made)
