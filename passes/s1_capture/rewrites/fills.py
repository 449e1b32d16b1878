"""Values that are the same everywhere, into which others are written: made like a value of their shape.

`zeros(batch * length, width)` says nothing of rows, and would be made for all of them and kept.
`zeros_like(x)` is made by rows. What is assigned in the places of a mask is chosen by it, place by place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from ...graph.facts import shape_of, tensors_of
from ...graph.op_arguments import arguments
from ..normalize import AHEAD, insert, is_returned, rewrite

aten = torch.ops.aten
FILLS: dict[Any, float | None] = {
    aten.zeros.default: 0.0, aten.ones.default: 1.0, aten.full.default: None, aten.empty.memory_format: 0.0,
    aten.new_zeros.default: 0.0, aten.new_ones.default: 1.0, aten.new_full.default: None,
    aten.new_empty.default: 0.0,
}  # fmt: skip


@rewrite(aten.empty_like.default)
def not_written_yet(graph: Graph, node: Node) -> Node | None:
    """Memory that is written later holds zeros until then, which is one of the things it may hold."""
    value = node.meta["val"]
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return None
    given = {name: node.kwargs[name] for name in ("dtype", "device") if name in node.kwargs}
    return insert(graph, node, aten.zeros_like.default, node.args[0], **given)


@rewrite(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def of_its_own(graph: Graph, node: Node) -> Node | None:
    """Of the value that gives only its dtype and its device nothing is read: `full` makes the same."""
    number, value = arguments(node).get("fill_value", FILLS[node.target]), node.meta["val"]
    size, kind = arguments(node)["size"], type(value)
    is_number = not isinstance(number, Node) or isinstance(number.meta["val"], torch.SymInt)
    if not is_number or kind is not FakeTensor or value.layout is not torch.strided:
        return None
    return insert(graph, node, aten.full.default, size, number, dtype=value.dtype, device=value.device)


LIKE = {aten.zeros_like.default: 0.0, aten.ones_like.default: 1.0, aten.full_like.default: None}


@rewrite(*LIKE)
def like_one_row(graph: Graph, node: Node) -> Node | None:
    """`zeros_like(x[:, 0])` reads no row: it has the sizes of the other dims of `x`."""
    row, value = node.args[0], node.meta["val"]
    number = arguments(node).get("fill_value", LIKE[node.target])
    if row.target is not aten.select.int or isinstance(number, Node):  # type: ignore[union-attr]
        return None
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return None
    source: Any = row.args[0]  # type: ignore[union-attr]
    dims = [d for d in range(len(shape_of(source))) if d != row.args[1] % len(shape_of(source))]  # type: ignore[union-attr]
    sizes = [
        int(s) if (s := shape_of(source)[d]).is_Integer else insert(graph, node, aten.sym_size.int, source, d)
        for d in dims
    ]
    return insert(graph, node, aten.full.default, sizes, number, dtype=value.dtype, device=value.device)


@rewrite(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    aten.index_put.default, aten.index_add.default, aten.index_copy.default, aten.select_scatter.default,
    aten.slice_scatter.default,
)  # fmt: skip
def base_like_another(graph: Graph, node: Node) -> Node | None:
    """What is written into is made like a value that has its shape."""
    base: Any = node.args[0]
    if base.target not in FILLS or not any(s.free_symbols for s in shape_of(base)) or is_returned(base):
        return None
    alike = _alike(node, base)
    number = arguments(base)["fill_value"] if FILLS[base.target] is None else FILLS[base.target]
    value = base.meta["val"]
    if alike is None or isinstance(number, Node):
        return None
    made = insert(graph, node, aten.full_like.default, alike, number, dtype=value.dtype, device=value.device)
    node.replace_input_with(base, made)
    return None


def _alike(node: Node, base: Node) -> Node | None:
    """The last value of the shape of `base` that goes into what is written, on which that depends already."""
    pending = [n for n in node.all_input_nodes if n is not base]
    found: set[Node] = set()
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += one.all_input_nodes
    return next(
        (
            n
            for n in reversed(list(node.graph.nodes))
            if n in found
            and n.target not in FILLS
            and tensors_of(n)
            and _is_one(n)
            and shape_of(n) == shape_of(base)
        ),
        None,
    )


def _is_one(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


@rewrite(aten.slice_scatter.default)
def parts_side_by_side(graph: Graph, node: Node) -> Node | None:
    """Parts written side by side, until nothing is left of what was there, are a `cat` of the parts."""
    parts: dict[int, tuple[int, Node]] = {}
    base, dim, size = node, None, 0
    while base.target is aten.slice_scatter.default:
        found = _written(base)
        if found is None or dim not in (None, found[0]):
            return None
        dim, start, stop, size, part = found
        if start < stop and any(start < end and first < stop for first, (end, _) in parts.items()):
            return None  # one was written over another
        if start < stop:
            parts[start] = stop, part
        base = base.args[0]
        if sum(end - first for first, (end, _) in parts.items()) == size:
            return insert(graph, node, aten.cat.default, [parts[first][1] for first in sorted(parts)], dim)
    return None


def _written(node: Node) -> tuple[int, int, int, int, Node] | None:
    """Dim, first entry, end and size of the dim that a part is written to, and the part; None if not known.

    Not where the dim has a symbol for its size, or a part another dtype than the whole.
    """
    call = arguments(node)
    part, dim = call["src"], call["dim"] % node.meta["val"].dim()
    size, start, stop = shape_of(node)[dim], call["start"], call["end"]
    if call["step"] != 1 or not size.is_Integer or any(isinstance(n, Node) for n in (start, stop)):
        return None
    if tensors_of(part)[0].dtype != node.meta["val"].dtype:
        return None
    first, end, _ = slice(start, stop).indices(int(size))
    return dim, first, end, int(size), part


# ---- in the places of a mask

LIFTED = "lifted"  # of a constant that the graph itself has made: nobody else can change it


@AHEAD.append
def note_lifted(graph: Graph) -> None:
    """Note which constants come from the function that was captured, as of `torch.tensor(0.5)` in it."""
    for node in graph.nodes:
        if node.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            node.args[0].meta[LIFTED] = True


@rewrite(aten.index_put.default)
def assigned_by_mask(graph: Graph, node: Node) -> Node | None:
    """`x[mask] = value` -> `where(mask, value, x)`, for one value, or one for all places that are alike.

    For x (before..., masked..., behind...), a mask (masked...), and a value that is broadcast to
    (before..., places, behind...) and has no dim, or one of size 1, for the places.
    """
    call = arguments(node)
    value, into, (mask, before) = call["values"], call["self"], _only_mask(call["indices"])
    if mask is None or call["accumulate"]:
        return None
    masked = len(shape_of(mask))
    behind = len(shape_of(into)) - before - masked
    place = len(shape_of(value)) - behind - 1  # the dim of the value for the places that the mask selects
    number = _number(value)
    unlike = place >= 0 and shape_of(value)[place] != 1
    if unlike or (number is None and value.op == "get_attr"):
        return None
    for _ in range(behind):
        mask = insert(graph, node, aten.unsqueeze.default, mask, -1)
    if number is not None:
        return insert(graph, node, aten.masked_fill.Scalar, into, mask, number)
    for _ in range(masked - 1 if place >= 0 else 0):
        value = insert(graph, node, aten.unsqueeze.default, value, place)
    return insert(graph, node, aten.where.self, mask, value, into)


def _only_mask(indices: Any) -> tuple[Node | None, int]:
    """The only index, if it is a mask, and how many dims are before those that it has."""
    given = [(n, dim) for dim, n in enumerate(indices) if n is not None]
    alone = len(given) == 1 and given[0][0].meta["val"].dtype == torch.bool and shape_of(given[0][0])
    return given[0] if alone else (None, 0)


def _number(value: Node) -> Any:
    """The number that a constant of the function is; None of any other value."""
    while value.target is aten.detach.default:
        value = value.args[0]  # type: ignore[assignment]
    if value.op != "get_attr" or LIFTED not in value.meta:
        return None
    constant = operator.attrgetter(value.target)(value.graph.owning_module)  # type: ignore[arg-type]
    return constant.item() if constant.numel() == 1 else None


# ---- rows put in the places of a mask, as rows that are looked up


@rewrite(aten.masked_scatter.default)
def looked_up(graph: Graph, node: Node) -> Node | None:
    """`x.masked_scatter(mask, rows)` -> `where(mask, embedding(rows, how many places there were), x)`.

    Where a row is taken from depends on how many places come before it, in all of the batch: on the mask
    alone, which has no gradient, and so is counted once. What is looked up is then each row's own.

    For x (..., length, width), a mask (..., length, 1) and rows (n, width). The first row that is looked up
    is one of zeros, for places that take none: with more places than rows the lookup fails, as the op does.
    """
    call = arguments(node)
    value, mask, rows = call["self"], _narrow(call["mask"]), call["source"]
    sizes, source = shape_of(value), shape_of(rows)
    if mask is None or len(sizes) not in (2, 3) or len(source) < 2 or source[-1] != sizes[-1]:
        return None
    if shape_of(mask) != (*sizes[:-1], 1):
        return None
    add = lambda op, *args: insert(graph, node, op, *args)  # noqa: E731
    rows = add(aten.flatten.using_ints, rows, 0, len(source) - 2) if len(source) > 2 else rows
    ones = add(aten.to.dtype, mask, torch.long)
    length = len(sizes) - 2
    place = add(aten.cumsum.default, ones, length)
    if length:
        counts = add(aten.sum.dim_IntList, ones, [length], True)
        before = add(aten.sub.Tensor, add(aten.cumsum.default, counts, 0), counts)
        place = add(aten.add.Tensor, place, before)
    place = add(aten.squeeze.dim, add(aten.mul.Tensor, place, ones), -1)
    none = add(aten.new_zeros.default, rows, [1, sizes[-1]])
    table = add(aten.cat.default, [none, rows])
    return add(aten.where.self, mask, add(aten.embedding.default, table, place), value)


def _narrow(mask: Node) -> Node | None:
    """A mask before it was spread over the width of the rows."""
    while mask.target in (aten.expand.default, aten.expand_as.default, aten.to.device, aten.to.dtype):
        before = mask.args[0]
        if before.meta["val"].dtype != mask.meta["val"].dtype:  # type: ignore[union-attr]
            break
        mask = before  # type: ignore[assignment]
    return mask if len(shape_of(mask)) and shape_of(mask)[-1] == 1 else None
