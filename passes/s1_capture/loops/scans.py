"""PyTorch's `scan`, a loop along a dim with carried values, as a recurrence.

A scan along the sequence is one op, `streambp_fx::recurrence`, of which a chunk does its own rows: it takes
the carried values that the chunk before has left, and leaves its own. What is no such loop is unrolled.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ...graph.autograd_functions import Retrace
from ...graph.facts import expression
from ...graph.ops.recurrence import RECURRENCE
from .apart import parts_of
from .body import LoopBody, LoopNotUnderstood, Size, known_loop, plain_body, refuse_effects_of
from .first_row import NotApart, halves
from .in_place import refuse_shared

log = logging.getLogger(__name__)
SCAN = getattr(torch.ops.higher_order, "scan", None)


def replaced_scan(graph: Graph, node: Node) -> list[Node]:
    """Replace a call of the op in a Dynamo graph by one of `scan` below; nodes that nobody reads any more."""
    body, begin, rows, rest = node.args
    entries = {u.args[1] if u.target is operator.getitem else None for u in node.users}
    read = None if None in entries else tuple(sorted(entries))  # type: ignore[type-var]
    with graph.inserting_before(node):
        new = graph.call_function(scan, (body, begin, rows, rest, read))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return []


def scan(
    body: GraphModule,
    begin: Sequence[Tensor],
    rows: Sequence[Tensor],
    rest: Sequence[Any],
    read: tuple[int, ...] | None,
) -> list[Tensor | None]:
    """What PyTorch's op of this name returns: the carried values after the loop, and results by rows.

    Args:
        body: what is done with a row, see `LoopBody.module`.
        begin: what the carried values begin with.
        rows: values with the rows in dim 0, (T, ...).
        rest: what the body takes besides, tensors and numbers.
        read: which of what it returns is read; the others may be None. None: all is.

    Returns:
        The carried values, in the shapes of `begin`, and the results, (T, ...).
    """
    try:
        return _recurrence(body, begin, rows, rest, read)
    except LoopNotUnderstood as error:
        log.info("a loop along a dim is unrolled: it %s", error)
        return _unrolled(body, begin, rows, rest)


def _unrolled(
    body: GraphModule, begin: Sequence[Tensor], rows: Sequence[Tensor], rest: Sequence[Any]
) -> list[Tensor | None]:
    """The same, one row after the other."""
    return _row_by_row(body, begin, rows, rest, lambda module: Retrace(module).run)


def _row_by_row(
    body: GraphModule,
    begin: Sequence[Tensor],
    rows: Sequence[Tensor],
    rest: Sequence[Any],
    runs: Callable[[GraphModule], Callable[..., Any]] = lambda module: module,
) -> list[Tensor | None]:
    carried, results = list(begin), []
    first, other = (None if x is None else runs(x) for x in halves(body))
    assert other is not None
    for k in range(int(rows[0].shape[0])):
        run = other if k or first is None else first
        found = run(*carried, *(x.select(0, k) for x in rows), *rest)
        carried = list(found[: len(begin)])
        results.append(found[len(begin) :])
    return [*carried, *(torch.stack(x) for x in zip(*results, strict=True))]


def with_plain_loops(module: GraphModule) -> GraphModule:
    """A Dynamo graph whose scans run row by row, as the loops that they stand for; the graph, if it has none.

    PyTorch's own `scan` compiles its body when it is called, and has wrong gradients on 2.11 for a second
    length.
    """
    parts = [(n, m) for n, m in module.named_children() if isinstance(m, GraphModule)]
    plain = {n: with_plain_loops(m) for n, m in parts}
    if not any(n.target is SCAN for n in module.graph.nodes) and all(plain[n] is m for n, m in parts):
        return module
    made = GraphModule(module, copy.deepcopy(module.graph))
    for node in made.graph.nodes:
        if node.target is SCAN:
            node.target = _row_by_row
    for name, part in plain.items():
        if hasattr(made, name):  # what no node calls is left out
            setattr(made, name, part)
    made.recompile()
    return made


def _recurrence(
    module: GraphModule,
    begin: Sequence[Tensor],
    rows: Sequence[Tensor],
    rest: Sequence[Any],
    read: tuple[int, ...] | None,
) -> list[Tensor | None]:
    """The same as one op, or as one for each kind of results, see NOTE [results of a loop].

    Raises:
        LoopNotUnderstood: it cannot be.
    """
    if not isinstance(rows[0].shape[0], torch.SymInt):
        raise LoopNotUnderstood("goes over a number of rows that is always the same")
    carried, device = len(begin), rows[0].device.type
    last = tuple(k for k in range(carried) if read is None or k in read)
    body, operands, results = understood(module, begin, rows, rest, last)
    own = len(results) - len(last)
    wanted = [k for k in range(own) if read is None or carried + k in read]
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    made: dict[int, Tensor] = {}
    for part in parts_of(body, operands, results, (*wanted, *range(own, len(results)))):
        op = RECURRENCE(known_loop(part.body, part.operands), part.operands, [], cast)
        of_part = _apart(op, [results[k] for k in part.results], part.body.shared)
        made.update(zip(part.results, of_part, strict=True))
    after = {k: made[own + place].select(0, -1) for place, k in enumerate(last)}
    return [*map(after.get, range(carried)), *map(made.get, range(own))]


def refuse_loops(
    module: GraphModule, begin: Sequence[Tensor], rows: Sequence[Tensor], rest: Sequence[Any]
) -> None:
    """See to it that a Python loop that was traced as a scan can be one.

    Args:
        module, begin, rows, rest: as `scan` takes them; shapes, dtypes and memory are looked at.

    Raises:
        LoopNotUnderstood: it is no step with a state.
        SharedChange: it changes something in place that somebody else may know of.
    """
    refuse_shared(module, begin, rows, rest)
    understood(module, begin, rows, rest)


def understood(
    module: GraphModule,
    begin: Sequence[Tensor],
    rows: Sequence[Tensor],
    rest: Sequence[Any],
    last: tuple[int, ...] = (),
) -> tuple[LoopBody, list[Tensor], list[Tensor]]:
    """A loop as a step with a state: its body, the operands of the op, and the results of one row.

    Args:
        module, begin, rows, rest, last: as `scan` takes them; shapes and dtypes alone are looked at.

    Raises:
        LoopNotUnderstood: it is none.
    """
    operands = [*rows, *begin, *(x for x in rest if isinstance(x, Tensor))]
    devices = {x.device for x in operands}
    try:
        first, module = halves(module)
    except NotApart as error:
        raise LoopNotUnderstood(f"is not one step from row to row: {error}") from error
    first = None if first is None else plain_body(first, devices)
    kinds = tuple(None if isinstance(x, Tensor) else _number(x, operands, len(rows)) for x in rest)
    body = LoopBody(plain_body(module, devices), len(begin), len(rows), kinds, last, first=first)
    with disable_proxy_modes_tracing():
        results = body.results_of(operands)
    if not results:
        raise LoopNotUnderstood("has no result by rows")
    if not all(x.is_floating_point() for x in (*results, *begin)):
        raise LoopNotUnderstood("carries or makes values that are no floating-point numbers")
    refuse_effects_of(body, operands)
    return body, operands, results


def _number(value: Any, operands: Sequence[Tensor], by_rows: int) -> Size | int | float:
    """A number that the body takes; one that is a size of an operand, as that."""
    if not isinstance(value, torch.SymInt):
        if not isinstance(value, (int, float)):
            raise LoopNotUnderstood(f"takes a value of type {type(value).__name__}")
        return value
    for k, operand in enumerate(operands):
        for dim, size in enumerate(operand.shape):
            if (k >= by_rows or dim) and expression(size) == expression(value):
                return Size(k, dim)
    raise LoopNotUnderstood("reads a size that none of its operands has")


def _apart(made: Tensor, results: Sequence[Tensor], shared: int) -> list[Tensor]:
    """The results by rows, of what `LoopBody.joined` has made of each row."""
    if len(results) == 1:
        return [made]
    widths = [x.flatten(shared).shape[-1] if x.dim() > shared else 1 for x in results]
    parts = made.split(widths, -1)
    return [
        (p.unflatten(-1, x.shape[shared:]) if x.dim() > shared else p.squeeze(-1)).to(x.dtype)
        for p, x in zip(parts, results, strict=True)
    ]
