"""signatures: segments that are the same up to their inputs get one signature, and so one set of programs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import Facts, Kind, Segment, tensors_of
from .segment import closure


def signatures(facts: Facts) -> Facts:
    """Give each segment its signature. One linear scan over the nodes."""
    for piece in facts.segments:
        piece.signature = signature(facts, piece)
    return facts


def signature(facts: Facts, piece: Segment) -> str:
    """Digest of ops, arguments, sizes, dtypes, layouts, gradients wanted and masks of a segment.

    Parameters and streamed inputs count by position; values without a gradient that make a mask count by
    identity, since what was proved of the mask was proved of them.
    """
    number: dict[Node, int] = {}
    for node in (*piece.rows, *piece.constants, *piece.whole):
        number[node] = len(number)
    parts: list[Any] = [piece.chunked, piece.kind, piece.reach, str(piece.window)]
    parts += [(_value(n), n in facts.needs_grad, facts.kinds[n]) for n in number]
    inlined = closure(facts, piece.nodes, {Kind.CONSTANT, Kind.SQUARE})
    for node in sorted({*inlined, *piece.nodes}, key=_order(facts)):
        if node in number:
            continue  # an input: its place in the list above says it all
        number[node] = len(number)
        if facts.kinds[node] is Kind.SQUARE:
            parts.append(("square", node.name))
            continue
        args = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _reference(facts, number, n))
        parts.append((_target(node), str(args), _value(node), _layout(facts, number, node)))
    parts += [tuple(number[n] for n in piece.outputs), tuple(n in facts.needs_grad for n in piece.outputs)]
    for mixing in piece.mixings:
        parts.append((mixing.reach, str(mixing.window), mixing.mask.name if mixing.mask else None))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _order(facts: Facts) -> Any:
    if not hasattr(facts, "_positions"):
        facts._positions = {n: k for k, n in enumerate(facts.nodes)}  # type: ignore[attr-defined]
    return facts._positions.__getitem__  # type: ignore[attr-defined]


def _reference(facts: Facts, number: dict[Node, int], node: Node) -> str:
    if facts.kinds[node] is Kind.SIZE:
        return f"<{node.meta['val']}>"
    return f"%{number.get(node, node.name)}"


def _target(node: Node) -> str:
    """What a node does: a function that is one node counts by its graphs."""
    return getattr(node.target, "content", None) or str(node.target)


def _layout(facts: Facts, number: dict[Node, int], node: Node) -> tuple | None:
    """The layout of a value; the sort that orders a dim counts by its place in the segment."""
    axes = facts.layouts.get(node)
    if axes is None:
        return None
    return tuple(a and (str(a), a.order and number.get(a.order, a.order.name)) for a in axes)


def _value(node: Node) -> tuple:
    return tuple((tuple(str(s) for s in t.shape), t.dtype, str(t.device)) for t in tensors_of(node))
