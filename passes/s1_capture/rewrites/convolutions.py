"""Convolutions along the sequence in normal form: padded on both sides and cut, they read backwards.

Rows that come later, by one or more (`cat([first, x[:, :-1]], 1)`, `pad(x, (0, 0, 1, -1))`; token shift), are
a convolution without a weight: so one op is all that reads rows before its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ...graph.facts import shape_of
from ...graph.op_arguments import arguments
from ...graph.ops.causal_convolution import CAUSAL_CONV1D, CHANNELS_APART
from ...graph.ops.recurrence import RECURRENCE
from ..normalize import insert, is_beginning, rewrite

aten = torch.ops.aten
PADS = (aten.pad.default, aten.constant_pad_nd.default)


@rewrite(aten.slice.Tensor)
def cut_after_padding(graph: Graph, node: Node) -> Node | None:
    """`conv1d(x, w, padding=k - 1)[..., :rows]` reads rows up to its own."""
    call = arguments(node)
    source: Any = call["self"]
    if source.target is not aten.conv1d.default or not is_beginning(call, 2):
        return None
    own = arguments(source)
    width = _reach(own)
    if width is None or list(own["padding"]) != [width] or shape_of(node)[2] != shape_of(own["input"])[2]:
        return None
    return _causal(graph, node, own["input"], own)


@rewrite(aten.conv1d.default)
def padded_before(graph: Graph, node: Node) -> Node | None:
    """`conv1d(pad(x, (k - 1, 0)), w)` reads rows up to its own, and nothing else where k is 1."""
    own = arguments(node)
    padded: Any = own["input"]
    reach = _reach(own)
    if list(own["padding"]) != [0] or reach is None:
        return None
    if reach == 0:
        return _causal(graph, node, padded, own)
    if padded.target is aten.conv1d.default:
        return _after_another(graph, node, own, arguments(padded))
    source = _before(padded, reach)
    return None if source is None else _causal(graph, node, source, own)


def _before(padded: Any, rows: int) -> Node | None:
    """What has so many rows of zeros before it in a value; None if that is not what it is."""
    if padded.target not in PADS:
        return None
    pad = arguments(padded)
    return pad["self"] if _is_of_zeros(pad) and list(pad["pad"]) == [rows, 0] else None


def _is_of_zeros(pad: dict[str, Any]) -> bool:
    return pad.get("mode", "constant") == "constant" and not pad["value"]


def _after_another(graph: Graph, node: Node, own: dict[str, Any], first: dict[str, Any]) -> Node | None:
    """`conv1d(conv1d(pad(x, (k + l - 2, 0)), v, a), w, b)`: padded once for both.

    What the first makes of zeros is its bias a, which the second reads in place of rows before the first one.
    So it reads rows without a, and has what w makes of a in its own bias.
    """
    reach = _reach(first)
    if reach is None or list(first["padding"]) != [0]:
        return None
    source = _before(first["input"], reach + _reach(own))  # type: ignore[operator]
    if source is None:
        return None
    rows = _causal(graph, node, source, {**first, "bias": None})
    if first["bias"] is None:
        return _causal(graph, node, rows, own)
    made, each, _ = (int(n) for n in shape_of(own["weight"]))
    taps = insert(graph, node, aten.sum.dim_IntList, own["weight"], [2])
    taps = insert(graph, node, aten.view.default, taps, [own["groups"], made // own["groups"], each])
    bias = insert(graph, node, aten.view.default, first["bias"], [own["groups"], 1, each])
    bias = insert(graph, node, aten.sum.dim_IntList, insert(graph, node, aten.mul.Tensor, taps, bias), [2])
    bias = insert(graph, node, aten.view.default, bias, [made])
    if own["bias"] is not None:
        bias = insert(graph, node, aten.add.Tensor, own["bias"], bias)
    return _causal(graph, node, rows, {**own, "bias": bias})


def _reach(call: dict[str, Any]) -> int | None:
    """How far a convolution of rows reads, the first row not counted; None if it is not by rows."""
    shape = shape_of(call["input"])
    width = shape_of(call["weight"])[2]
    if len(shape) != 3 or list(call["stride"]) != [1] or not width.is_Integer:
        return None
    return int(width - 1) * call["dilation"][0]


def _causal(graph: Graph, node: Node, source: Node, call: dict[str, Any]) -> Node:
    """A convolution that reads no later rows.

    In a model with recurrences it is one itself: from chunk to chunk go the few rows that the next one reads.
    Elsewhere the rows before a chunk are columns, those of all rows, so that no device waits for another one;
    a layer with a recurrence goes from chunk to chunk anyway.
    """
    if _is_of_channels_apart(source, call) and graph.find_nodes(op="call_function", target=RECURRENCE):
        operands = [source, call["weight"], call["bias"]]
        return insert(graph, node, RECURRENCE, CHANNELS_APART, operands, [], None)
    given = (call["weight"], call["bias"], call["dilation"][0], call["groups"])
    return insert(graph, node, CAUSAL_CONV1D, source, *given)


def _is_of_channels_apart(source: Node, call: dict[str, Any]) -> bool:
    """True if each channel is convolved for itself, with neighbouring rows."""
    made, each, width = shape_of(call["weight"])
    channels = shape_of(source)[1]
    return each == 1 and made == channels == call["groups"] and width > 1 and call["dilation"][0] == 1


@rewrite(aten.cat.default)
def later_by_a_row(graph: Graph, node: Node) -> Node | None:
    """`cat([first, x[:, :-1]], 1)`: the rows of x, each a row later, and a first one."""
    call = arguments(node)
    parts: Any = call["tensors"]
    if len(parts) != 2 or call["dim"] % 3 != 1:
        return None
    first, rest = parts
    product = rest if rest.target is aten.linear.default else None  # of which a slice is that of its operand
    rest = rest if product is None else product.args[0]
    if rest.target is not aten.slice.Tensor:
        return None
    cut = arguments(rest)
    source: Any = cut["self"]
    made, given = shape_of(node), shape_of(source)
    if (
        not _has_rows(node)
        or len(given) != 3
        or given[:2] != made[:2]
        or shape_of(first) != (made[0], 1, made[2])
    ):
        return None
    if (cut["dim"] % 3, cut["start"] or 0, cut["end"], cut["step"]) != (1, 0, -1, 1):
        return None
    if product is not None:
        source = insert(graph, node, aten.linear.default, source, *product.args[1:])
    moved = _moved(graph, node, source, 1)
    rows = insert(graph, node, aten.sym_size.int, source, 1)
    numbers = insert(graph, node, aten.arange.default, rows, device=node.meta["val"].device)
    is_first = insert(graph, node, aten.lt.Scalar, insert(graph, node, aten.unsqueeze.default, numbers, 1), 1)
    return insert(graph, node, aten.where.self, is_first, first, moved)


@rewrite(*PADS)
def later_by_padding(graph: Graph, node: Node) -> Node | None:
    """`pad(x, (0, 0, k, -k))`: the rows of x, each k rows later, after k rows of zeros."""
    call = arguments(node)
    pad, source = list(call["pad"]), call["self"]
    if not _is_of_zeros(call) or not _has_rows(node) or shape_of(source) != shape_of(node):
        return None
    if len(pad) not in (4, 6) or any(isinstance(n, Node) for n in pad) or any(pad[:2] + pad[4:]):
        return None
    if pad[2] <= 0 or pad[3] != -pad[2]:
        return None
    return _moved(graph, node, source, pad[2])


def _has_rows(node: Node) -> bool:
    """True for floating (samples, rows, width) with a number for the width."""
    shape = shape_of(node)
    known = len(shape) == 3 and bool(shape[1].free_symbols) and shape[2].is_Integer
    return known and node.meta["val"].is_floating_point()


def _moved(graph: Graph, node: Node, source: Node, by: int) -> Node:
    """The rows of (samples, rows, width), each so many rows later; the first are zeros."""
    columns = insert(graph, node, aten.transpose.int, source, 1, 2)
    found = insert(graph, node, CAUSAL_CONV1D, columns, None, None, by, 1)
    return insert(graph, node, aten.transpose.int, found, 1, 2)
