"""Models of transformers in float64 throughout, for comparisons in which no rounding hides anything.

NOTE [float32 inside float64 models]. transformers computes norms, eager softmax, rotary tables and the loss
in float32 whatever the dtype of the weights is. A float64 model then carries roundings of 6e-8 in sums over
rows (the loss; the norm weights of gemma) and over keys (eager softmax), and any other order of the same
sum differs by as much: 1e-9 could not be asked of anybody. So `float32` becomes `float64` and `.float()`
becomes `.double()` in the bytecode of the modelling code, for eager and streamed alike, and the old code is
put back afterwards. Line numbers stay.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_RENAME = {"float32": "float64", "float": "double"}
_SHARED = (
    "transformers.loss.loss_utils",
    "transformers.activations",
    "transformers.modeling_rope_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
)


def _double_code(code: types.CodeType) -> types.CodeType:
    consts = tuple(_double_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_names=tuple(_RENAME.get(n, n) for n in code.co_names), co_consts=consts)


def _functions(value: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """Functions defined by a module's global, those under decorators and in classes included."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield from _functions(cell.cell_contents, seen)
    elif isinstance(value, type) and value.__module__.startswith("transformers."):
        for member in list(vars(value).values()):
            yield from _functions(member, seen)


@contextlib.contextmanager
def true_double(*models: nn.Module) -> Iterator[None]:
    """Within: the modelling code of these models computes in float64 throughout."""
    names = {type(m).__module__ for model in models for m in model.modules()} | set(_SHARED)
    names = {n for n in names if n.startswith("transformers.models.") or n in _SHARED}
    undo: list[tuple[types.FunctionType, types.CodeType]] = []
    seen: set[int] = set()
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            module = sys.modules[name]
            # where the builtin `float(...)` is called, its name is changed as well
            module.double = float  # type: ignore[attr-defined]
            stack.callback(delattr, module, "double")
            for value in list(vars(module).values()):
                for fn in _functions(value, seen):
                    if fn.__module__ in names and not fn.__globals__.get("__name__", "").startswith("torch"):
                        new = _double_code(fn.__code__)
                        if new != fn.__code__ and fn.__globals__["__name__"] in names:
                            undo.append((fn, fn.__code__))
                            fn.__code__ = new
        try:
            yield
        finally:
            for fn, code in undo:
                fn.__code__ = code
