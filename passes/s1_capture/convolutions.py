"""Convolutions along the sequence in normal form: padded on both sides and cut, they read backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.causal_convolution import CAUSAL_CONV1D
from ..graph.facts import shape_of
from ..graph.op_arguments import arguments
from .normalize import insert, is_beginning, rewrite

aten = torch.ops.aten


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
    if _reach(own) == 0 and list(own["padding"]) == [0]:
        return _causal(graph, node, padded, own)
    if padded.target not in (aten.pad.default, aten.constant_pad_nd.default) or list(own["padding"]) != [0]:
        return None
    pad = arguments(padded)
    zeros = pad.get("mode", "constant") == "constant" and not pad["value"]
    if not zeros or list(pad["pad"]) != [_reach(own), 0]:
        return None
    return _causal(graph, node, pad["self"], own)


def _reach(call: dict[str, Any]) -> int | None:
    """How far a convolution of rows reads, the first row not counted; None if it is not by rows."""
    shape = shape_of(call["input"])
    width = shape_of(call["weight"])[2]
    if len(shape) != 3 or list(call["stride"]) != [1] or not width.is_Integer:
        return None
    return int(width - 1) * call["dilation"][0]


def _causal(graph: Graph, node: Node, source: Node, call: dict[str, Any]) -> Node:
    given = (call["weight"], call["bias"], call["dilation"][0], call["groups"])
    return insert(graph, node, CAUSAL_CONV1D, source, *given)
