"""Gives Dynamo other code for a function that branches on data, where it has failed to trace it as it is."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch._dynamo import variables as kinds
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...versions.differences import GET_ATTRIBUTE, with_function
from ..loops.closed import NotClosed
from ..loops.inlining import is_written, with_code
from ..loops.record import current_record
from ..sizes import trace_again
from ..this_backend import MARK as STORED
from ..this_backend import is_ours
from .body import in_body, is_body, watch_effects
from .rewriting import with_branches

log = logging.getLogger(__name__)
MARK = "is_streambp_fx_branches"
# What is asked of a tensor and is the same for the one that a branch makes and the one from before: they have
# the same shape, dtype and device. Or what is read of its values.
OF_VALUES = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "dtype", "device"),
    *("is_cuda", "is_cpu", "get_device", "itemsize", "element_size", "nbytes", "is_floating_point"),
    *("is_complex", "item", "tolist", "__setitem__"),
}
# Of a graph. Each adds some 0.2 s to the time in which it is compiled.
MOST_BODIES = 512


def watch_branches() -> None:
    """From now on branches on data in functions that are inlined for this backend are traced."""
    original = InliningInstructionTranslator.inline_call
    if getattr(original, MARK, False):
        return

    watch_effects()
    _watch_objects()

    @functools.wraps(original)
    def inline_call(cls: Any, parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if is_body(func):
            _count(parent.output)
            return in_body(parent, func, lambda: original(parent, func, *args, **kwargs))
        record = current_record()
        own = is_written(func) and type(func.fn) is FunctionType
        if not own or record is None or record.branches is None or not is_ours(parent.output.compiler_fn):
            return original(parent, func, *args, **kwargs)
        code = func.fn.__code__
        taken = record.branches.get(code)
        if taken:
            made = with_code(func.fn, with_branches(code))  # type: ignore[arg-type]
            record.without.add(made.__code__)
            func = with_function(func, made)
        try:
            return original(parent, func, *args, **kwargs)
        except RestartAnalysis:
            raise
        except Exception as error:
            if not (taken or (taken is None and _asks_data(error) and with_branches(code) is not None)):
                raise
            record.branches[code] = not taken
            if taken:
                log.info("branches of %s are not traced: %s", _place(code), error)
            parent.speculation_log.clear()
            raise RestartAnalysis(restart_reason="a branch on data") from error

    setattr(inline_call, MARK, True)
    InliningInstructionTranslator.inline_call = classmethod(inline_call)  # type: ignore[assignment, method-assign]


def _watch_objects() -> None:
    """From now on what asks more of a tensor than its values is looked at, in frames with branches on data.

    Where a branch gives a variable another value, eager has the tensor from before if it is not taken: that
    may have other strides, or no gradient. That it is another object shows nowhere (`objects`).
    """
    for name in ("call_method", GET_ATTRIBUTE):
        setattr(kinds.TensorVariable, name, _answering(getattr(kinds.TensorVariable, name)))


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def answered(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        found, record = original(self, tx, name, *args, **kwargs), current_record()
        branches = record is not None and record.branches and any(record.branches.values())
        if branches and name not in OF_VALUES and not _is_computed(found):
            assert record is not None
            record.branches = None
            tx.speculation_log.clear()
            raise RestartAnalysis(restart_reason=f"{name} of a tensor is asked behind a branch on data")
        return found

    setattr(answered, STORED, getattr(original, STORED, False))
    return answered


def _is_computed(value: Any) -> bool:
    """True for tensors, which are in the graph, and for methods, which are looked at when they are called."""
    if isinstance(value, kinds.lists.BaseListVariable) and not isinstance(value, kinds.lists.SizeVariable):
        return all(map(_is_computed, value.items))
    several = kinds.user_defined.UserDefinedTupleVariable  # what `topk` returns
    kept = (kinds.TensorVariable, kinds.GetAttrVariable, BaseUserFunctionVariable, several)
    return isinstance(value, kept)


def _count(output: Any) -> None:
    """Note a body of a graph.

    Raises:
        NotClosed: there are too many to trace.
    """
    output._streambp_bodies = getattr(output, "_streambp_bodies", 0) + 1
    if output._streambp_bodies > MOST_BODIES:
        raise NotClosed(f"there are more than {MOST_BODIES} branches on data")


def _asks_data(error: Exception) -> bool:
    """True if Dynamo has failed since Python asks the values of a tensor."""
    words = ("data-dependent", "capture_scalar_outputs")
    return isinstance(error, GuardOnDataDependentSymNode) or any(w in str(error).lower() for w in words)


def _place(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def end_graphs_at_branches() -> None:
    """Have the frame that is compiled traced again, in graphs that end where Python asks data.

    Not if it has to be one graph, or no branch of it was traced.

    Raises:
        TensorifyScalarRestartAnalysis: caught by Dynamo, which traces again.
    """
    record = current_record()
    traced = record is not None and record.branches is not None and any(record.branches.values())
    if record is not None and traced and not InstructionTranslator.current_tx().one_graph:
        record.branches = None
        trace_again("graphs that end where Python asks data")
