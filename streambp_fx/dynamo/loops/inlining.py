"""Gives Dynamo other code for a function that it inlines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserFunctionVariable

from ...versions.differences import called_function, with_function
from ..this_backend import MARK, is_ours
from .analysis import OWN
from .closed import NotClosed, Unchanged, watch_bodies
from .record import LoopRecord, current_record
from .rewriting import BODY, with_scans

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

    watch_bodies()

    @functools.wraps(original)
    def inline_call(cls: Any, parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        other = _stand_ins.get(func.fn) if is_written(func) else None
        if other is not None and is_ours(parent.output.compiler_fn):
            return original(parent, with_function(func, other), *args, **kwargs)
        if is_body(func) and (record := current_record()) is not None:
            return _in_body(parent, func, record, lambda: original(parent, func, *args, **kwargs))
        made = _with_scans(parent, func)
        if made is None:
            return original(parent, func, *args, **kwargs)
        record = current_record()
        assert record is not None
        bodies = record.bodies
        try:
            found = original(parent, made, *args, **kwargs)
            if _check(parent.output, refuse):
                if record.bodies == bodies:
                    raise NotClosed("its body was not seen")
                record.taken.add(func.get_code())
            return found
        except RestartAnalysis:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            record.refuse(func.get_code(), f"it cannot be traced as a scan ({reason})")
            parent.speculation_log.clear()
            raise RestartAnalysis(restart_reason="a loop is no scan") from error

    setattr(inline_call, MARK, True)
    InliningInstructionTranslator.inline_call = classmethod(inline_call)  # type: ignore[assignment, method-assign]


def _in_body(parent: Any, body: Any, record: LoopRecord, traced: Callable[[], Any]) -> Any:
    """Trace the body of a scan, or one that is traced for its shapes before, which must change nothing.

    Raises:
        NotClosed: it knows of something that may change, or changes something.
    """
    before = Unchanged(body, parent.output.side_effects)
    record.bodies += 1
    record.in_body += 1
    try:
        found = traced()
    finally:
        record.in_body -= 1
    before.refuse_changes()
    return found


def is_body(function: Any) -> bool:
    """True for the body of a loop that is traced as a scan."""
    return has_name(function, BODY)


def has_name(function: Any, name: re.Pattern[str]) -> bool:
    """True for a function that was made in the trace and has such a name."""
    made = isinstance(function, NestedUserFunctionVariable)
    return made and name.fullmatch(function.get_code().co_name) is not None


def _check(output: Any, refuse: Callable[..., Any]) -> bool:
    """Look at the scans that were traced; True if there are new ones."""
    new = [n for n in output.graph.nodes if n.target is SCAN and not n.meta.get(MARK)]
    for node in new:
        node.meta[MARK] = True
        body, *given = node.args
        values = torch.fx.node.map_arg(given, lambda n: n.meta["example_value"])
        refuse(output.nn_modules[body.target], *values)
    return bool(new)


def is_written(called: Any) -> bool:
    """True for a function or a method that somebody has written, and that was not made in what is traced."""
    return isinstance(called_function(called), UserFunctionVariable)


def _with_scans(parent: Any, func: Any) -> Any:
    """What Dynamo knows of a function, with other code; None if nothing changes."""
    if not is_written(func) or type(func.fn) is not FunctionType:
        return None
    function = func.fn
    code, names = function.__code__, function.__globals__
    record, library = current_record(), (function.__module__ or "").split(".")[0]
    if record is None or record.unrolls_all or library in ("torch", "streambp_fx"):
        return None
    if not is_ours(parent.output.compiler_fn) or code in record.refused or code in record.without:
        return None
    if (OWN - {"torch"}) & names.keys() or names.get("torch", torch) is not torch:
        return None
    changed = with_scans(code)
    record.unrolled.update(dict.fromkeys(changed.unrolled))
    if changed.code is None:
        return None
    return with_function(func, with_code(function, changed.code))


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """A function that is another in all but its code."""
    names = function.__globals__
    made = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made
