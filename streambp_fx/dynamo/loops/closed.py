"""What the body of a loop may know of: numbers, and Python values that no row changes.

NOTE [closed bodies]: a scan traces the body for one row, and the comparison with the loop sees six. Both say
nothing of a seventh row if the body hears of which row it is from something else than numbers: an iterator
that a function takes the next of, a counter that it hangs on a tensor, where a row lies in memory. So the
body may refer to what cannot change within it (constants, parameters, modules, functions, containers of
these; Dynamo refuses changes of objects from outside of a body), it may ask of tensors what is the same
for all rows, and it may not set attributes of tensors. These are lists of what is allowed: what is missing
in them costs a loop that is unrolled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import variables as kinds
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable, NestedUserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedVariable

from ...versions.differences import GET_ATTRIBUTE, called_object
from ..this_backend import MARK
from .record import current_record

# What may be asked of a tensor and is no tensor: the same for all rows.
ASKED = {
    *(
        "shape",
        "size",
        "ndim",
        "dim",
        "ndimension",
        "dtype",
        "device",
        "layout",
        "numel",
        "nelement",
        "__len__",
    ),
    *("is_floating_point", "is_complex", "is_cuda", "is_meta", "is_sparse", "is_quantized"),
    *("element_size", "__class__", "names"),
}
NUMBERS = (TensorVariable, kinds.SymNodeVariable)
# Kinds that have a source (they are there before the forward, and Dynamo guards changes of them) or no state.
FIXED = (
    kinds.ConstantVariable,
    kinds.BuiltinVariable,
    kinds.PythonModuleVariable,
    kinds.TorchInGraphFunctionVariable,
    kinds.NNModuleVariable,
    UserDefinedClassVariable,
)


NEW = (AttributeMutationNew, ValueMutationNew)


class NotClosed(Exception):
    """A body knows of something that may be another thing for each row."""


def refuse_open(body: Any, effects: SideEffects) -> list[int]:
    """See to it that the function of a body refers to nothing that may change from row to row.

    Args:
        body: what Dynamo knows of the function.
        effects: of the trace.

    Returns:
        Which values it refers to, in an order of theirs: another list if one of them is changed.

    Raises:
        NotClosed: it does.
    """
    seen: dict[int, None] = {}
    # and objects with attributes that this forward has set: functions may come to them by other ways
    pending = [
        body,
        *(x for x in effects.store_attr_mutations if isinstance(x, UserDefinedVariable) and x.source),
    ]
    while pending:
        value = pending.pop()
        if isinstance(value, kinds.LazyVariableTracker):
            value = value.realize()
        if id(value) not in seen:
            seen[id(value)] = None
            pending += _within(value, effects)
    return list(seen)


class Unchanged:
    """What a body may change where Dynamo lets it: outside of a scan, where it is traced for its shapes.

    Args:
        body, effects: as `refuse_open` takes them.
    """

    def __init__(self, body: Any, effects: SideEffects) -> None:
        self.body, self.effects = body, effects
        self.reached, self.known = refuse_open(body, effects), self._known()
        self.modified = self._modified()

    def refuse_changes(self) -> None:
        """Look again.

        Raises:
            NotClosed: something was changed since.
        """
        now = self._known()
        same = all(now.get(k) == value for k, value in self.known.items())
        if (
            not same
            or refuse_open(self.body, self.effects) != self.reached
            or self._modified() != self.modified
        ):
            raise NotClosed("it changes something outside of it")

    def _known(self) -> dict[int, Any]:
        """Attributes and entries of what Dynamo knows of, by object."""
        found: dict[int, Any] = {}
        for value in self.effects.id_to_variable.values():
            items = value.items if isinstance(value, (BaseListVariable, kinds.ConstDictVariable)) else ()
            entries = items.values() if isinstance(items, dict) else items
            own = self.effects.store_attr_mutations.get(value, {})
            found[id(value)] = list(map(id, entries)), [(n, id(v)) for n, v in own.items()]
        return found

    def _modified(self) -> set[int]:
        """Objects from before the trace that it changes."""
        known = [x for x in self.effects.id_to_variable.values() if not isinstance(x.mutation_type, NEW)]
        return {id(x) for x in known if self.effects.is_modified(x)}


def captured_by(function: NestedUserFunctionVariable, effects: SideEffects) -> Iterator[VariableTracker]:
    """What a function that was made in the trace refers to of the one around it."""
    for cell in function.closure.items if function.closure else ():  # type: ignore[attr-defined]
        before = cell.pre_existing_contents
        if before is not None or effects.has_pending_mutation_of_attr(cell, "cell_contents"):
            yield effects.load_cell(cell)  # else nothing is in it yet, and reading it is an error


def _within(value: VariableTracker, effects: SideEffects) -> Iterator[VariableTracker]:
    """The values that one leads to."""
    yield from effects.store_attr_mutations.get(value, {}).values()
    if isinstance(value, NestedUserFunctionVariable):
        yield from captured_by(value, effects)
    elif isinstance(value, BaseListVariable):
        yield from value.items
    elif isinstance(value, kinds.ConstDictVariable):
        yield from value.items.values()
    elif isinstance(value, UserDefinedVariable) and not isinstance(value, UserDefinedClassVariable):
        if value.source is None:
            raise NotClosed(f"it reads an object that was made for this call ({type(value).__name__})")
    elif isinstance(value, kinds.UserMethodVariable):
        yield called_object(value)
    elif isinstance(value, BaseUserFunctionVariable):
        if value.source is None:
            raise NotClosed("it calls a function that was made for this call")
    elif not isinstance(value, (*NUMBERS, *FIXED)) and not value.is_python_constant():
        raise NotClosed(f"it reads a value that may change from row to row ({type(value).__name__})")


def watch_bodies() -> None:
    """From now on what a body asks of tensors is looked at, in frames whose loops are read."""
    if getattr(TensorVariable.call_method, MARK, False):
        return
    for name in ("call_method", GET_ATTRIBUTE):
        answer = getattr(TensorVariable, name)
        setattr(TensorVariable, name, _asked(answer, lambda self, tx, asked, *_: asked))
    function = kinds.TorchInGraphFunctionVariable
    function.call_function = _asked(  # type: ignore[method-assign]
        function.call_function,
        lambda self, tx, given, *_: self.value.__name__ if _has_tensor(given) else None,
    )
    SideEffects.store_attr = _stored(SideEffects.store_attr)  # type: ignore[method-assign]


def _has_tensor(values: Any) -> bool:
    return any(isinstance(v, TensorVariable) for v in values)


def _asked(original: Callable[..., Any], name_of: Callable[..., str | None]) -> Callable[..., Any]:
    """A method that answers what is asked of a tensor, given `self` and `tx`."""

    @functools.wraps(original)
    def answered(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, tx, *args, **kwargs)
        if _is_in_body(tx.output) and isinstance(found, VariableTracker) and found.is_python_constant():
            name = name_of(self, tx, *args)
            if name is not None and name not in ASKED:
                raise NotClosed(f"asks a tensor for its {name}, which may be another for each row")
        return found

    setattr(answered, MARK, True)
    return answered


def _stored(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def store_attr(self: SideEffects, item: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(item, TensorVariable) and _is_in_body(self.output_graph_weakref()):
            raise NotClosed(f"sets the attribute {name} of a tensor")
        original(self, item, name, *args, **kwargs)

    return store_attr


def _is_in_body(output: Any) -> bool:
    """True while Dynamo traces the body of a scan."""
    record = current_record()
    tracer = getattr(output, "current_tracer", None)
    return record is not None and record.in_body > 0 and getattr(tracer, "parent", None) is not None
