"""What stands in a function in the place of a loop along rows (`rewriting`). Dynamo traces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils._pytree import tree_leaves, tree_map

from ...passes.s1_capture.loops.first_row import first_row, other_rows
from ...passes.s1_capture.loops.in_place import changed_to

# Says of a tuple that it stands in the place of a list.
ROWS = "rows of a scan"


def fits(
    count: Any, rows: Sequence[tuple[Any, int]], carried: Any, written: Sequence[tuple[Any, int]]
) -> bool:
    """True if a loop goes over all rows of tensors, and carries tensors.

    Args:
        count: how many rows it goes over; None: those that the first of `rows` has.
        rows: what it reads rows of, and in which dim these are. What is None is not read.
        carried: what the variables that it carries begin with.
        written: tensors of which it writes rows, and the dim of these.
    """
    read = [(value, dim) for value, dim in rows if value is not None]
    for value, dim in (*read, *written):
        if not isinstance(value, Tensor) or value.dim() <= (dim if dim >= 0 else -1 - dim):
            return False
        if count is None:
            count = value.shape[dim]
        if value.shape[dim] != count:
            return False
    return len(read) > 0 and all(
        x is None or (isinstance(x, Tensor) and x.is_floating_point()) for x in tree_leaves(carried)
    )


def scan(
    body: Callable[[bool, Any, Any], tuple[Any, Any]],
    carried: Any,
    rows: Sequence[tuple[Tensor, int]],
    has_first: bool,
) -> tuple[Any, Any]:
    """The loop: what is carried after the last row, and results of all rows, (T, ...).

    Args:
        body: takes whether a row is the first, what is carried and the rows; returns what is carried, and
            results.
        carried: what it begins with. What is None is something else after the first row.
        rows: tensors, and the dim of their rows; None is handed on as it is.
        has_first: the body asks whether a row is the first.
    """
    places = [k for k, (value, _) in enumerate(rows) if value is not None]
    count, given = len(rows), tuple(rows[k][0].movedim(rows[k][1], 0) for k in places)
    has_first = has_first or any(x is None for x in tree_leaves(carried))
    has_state = len(carried) > 0
    begin = carried if has_state else (given[0].new_zeros(()),)  # it wants one

    def run(is_first: bool, carried: Any, rows: Any) -> tuple[Any, Any]:
        every = [None] * count
        for place, row in zip(places, rows, strict=True):
            every[place] = row
        own = tree_map(lambda x: x, carried) if has_state else ()  # its lists may be changed
        after, made = body(is_first, own, tuple(every))
        return after if has_state else carried, made

    def step(carried: Any, rows: Any) -> tuple[Any, Any]:
        after, made = run(False, carried, rows)
        # a scan refuses results that are one another, or what it is given, or lie in memory in another way
        return tree_map(_copied, after), tree_map(_copied, made)

    def steps(carried: Any, rows: Any) -> tuple[Any, Any]:
        """NOTE [the first row] in `first_row.py`."""
        first, made = run(True, begin, rows)
        first = tree_map(lambda x, y: x.to(y.dtype), first, carried) if casts else first
        other, others = run(False, carried, tuple(other_rows(row) for row in rows))
        return tree_map(first_row, first, other), tree_map(first_row, made, others)

    casts, carried = torch.is_autocast_enabled(given[0].device.type), begin
    if has_first:  # what is computed here is looked at for its shape and dtype alone
        after, _ = run(True, begin, tuple(value[0] for value in given))
        carried = tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device), after)
    if casts:
        carried = _in_later_dtypes(step, carried, given)
    carried = tree_map(torch.Tensor.contiguous, carried)
    after, made = torch_scan(steps if has_first else step, carried, given)
    return (after if has_state else ()), made


def _in_later_dtypes(step: Callable[[Any, Any], tuple[Any, Any]], carried: Any, given: Any) -> Any:
    """What is carried, in the dtypes that it has after a row: under autocast it often begins in float32."""
    after, _ = step(carried, tuple(value[0] for value in given))
    return tree_map(lambda x, y: x.to(y.dtype), carried, after)


def _copied(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def changed(method: str, value: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What a tensor is after a method has changed it in place; the tensor itself is left as it is.

    Args:
        method: the name without its underscore; "copy": it is assigned as a whole.
        value: the tensor, of any shape and dtype.
        args, kwargs: of the method.

    Raises:
        TypeError: it would have another shape or dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError("a method changes something that is no tensor")
    if method == "copy":
        of = args[0] if isinstance(args[0], Tensor) else torch.full_like(value, args[0])
        return changed_to(value, of.to(value.dtype).expand(value.shape))
    made: Tensor = getattr(value, method)(*args, **kwargs)
    return changed_to(value, made)


def added(old: Any, new: Any) -> Any:
    """What `a += b` gives, which changes `a` if that is a tensor.

    Args:
        old: a tensor of any shape and dtype, or a number.
        new: `a + b`.

    Raises:
        TypeError: it is something else, or would have another shape or dtype.
    """
    if isinstance(old, Tensor):
        return changed_to(old, new)
    if not isinstance(old, (int, float, bool, complex)):
        raise TypeError(f"{type(old).__name__} is changed in place")
    return new


def put(made: Tensor, out: Tensor, dim: int, keeps: bool) -> Tensor:
    """A tensor of which each row was assigned.

    Args:
        made: what was assigned, (T, ...).
        out: the tensor, with T rows.
        dim: of its rows.
        keeps: what was assigned has a dim of one entry for the row.
    """
    row = out.narrow(dim, 0, 1) if keeps else out.select(dim, 0)
    made = made.to(device=out.device, dtype=out.dtype)
    while made.dim() - 1 < row.dim():
        made = made.unsqueeze(1)
    made = made.expand(made.shape[0], *row.shape)
    if keeps:
        made = made.squeeze(dim + 1 if dim >= 0 else dim)
    return made.movedim(0, dim).contiguous()


def joined(join: Callable[..., Tensor], rows: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.stack` or `torch.cat` of a list, or of the rows of a scan.

    Args:
        join: one of these two.
        rows: tensors; or `ROWS` and a tensor, (T, ...), which has what a list would have.

    Raises:
        TypeError: it is another function.
    """
    if type(rows) is not tuple or type(rows[0]) is not str:
        return join(rows, *args, **kwargs)
    if join not in (torch.stack, torch.cat, torch.concat):
        raise TypeError(f"{join} is not known to join tensors")
    made = rows[1]
    dim = args[0] if args else kwargs.get("dim", 0)
    if join is torch.stack:
        return made.movedim(0, dim).contiguous()
    dim = dim + made.dim() - 1 if dim < 0 else dim
    return made.movedim(0, dim).flatten(dim, dim + 1)
