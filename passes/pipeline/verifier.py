"""Verifies what passes claim: after each in tests, and with STREAMBP_CHECK=1.

What is looked at needs no op rule: it compares facts with the shapes of fake tensors, with the graph, and
with one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import Graph, Node

from ..graph.facts import CapturedGraph, Facts, Kind, Reach, Segment, operands, shape_of, tensors_of
from .runner import Pass


class UnsoundFacts(Exception):
    """Something that a pass claims is not so."""


#: Which kinds the operands of a value may have, see `Kind`.
MAY_READ = {
    Kind.SIZE: None,  # sizes of any value
    Kind.CONSTANT: {Kind.SIZE, Kind.CONSTANT, Kind.WHOLE},
    Kind.WHOLE: {Kind.SIZE, Kind.WHOLE},
    Kind.SQUARE: {Kind.SIZE, Kind.WHOLE, Kind.SQUARE},
    Kind.STREAM: None,
    Kind.REDUCED: None,
}
#: Whether a value of a kind has the sequence length in its shape, where it must or must not.
CARRIES = {Kind.CONSTANT: False, Kind.REDUCED: False, Kind.STREAM: True}


def verify_facts(one: Pass[Any, Any], subject: CapturedGraph | Facts) -> None:
    """Verify what is known after a pass over the captured graph.

    Raises:
        UnsoundFacts: something is not so.
    """
    subject.module.graph.lint()
    for node in subject.module.graph.nodes:
        if node.op != "output" and node.users and "val" not in node.meta:
            raise UnsoundFacts(f"{node.name} has no fake value")
    if not isinstance(subject, Facts):
        return
    for complaint in (*_kinds(subject), *_layouts(subject), *_masks(subject), *_segments(subject)):
        raise UnsoundFacts(complaint)


def _kinds(facts: Facts) -> Iterator[str]:
    """Kinds are closed under use."""
    for node in facts.nodes:
        if node.op == "output":
            continue
        kind = facts.kinds.get(node)
        if kind is None:
            yield f"{node.name} has no kind"
            continue
        counted = kind is Kind.STREAM and node in facts.local
        if kind in CARRIES and tensors_of(node) and facts.carries(node) != CARRIES[kind] and not counted:
            yield f"{node.name} is {kind.value} and has the shape {shape_of(node)}"
        may = MAY_READ[kind]
        for operand in operands(node) if node.op == "call_function" else ():
            own = facts.kinds.get(operand)
            if may is not None and own not in may:
                yield f"{node.name} is {kind.value} and reads {operand.name}, which is {own and own.value}"
    unknown = facts.needs_grad - set(facts.nodes)
    if unknown:
        yield f"{min(n.name for n in unknown)} has a gradient and is not in the graph"


def _layouts(facts: Facts) -> Iterator[str]:
    """An axis of the sequence has the size that it says."""
    for node, layout in facts.layouts.items():
        if layout is None or not tensors_of(node):
            continue
        sizes = shape_of(node)
        if len(layout) != len(sizes):
            yield f"{node.name} has {len(sizes)} dims, and its layout {len(layout)}"
            continue
        for size, axis in zip(sizes, layout, strict=True):
            if axis is None or facts.sequence is None:
                continue
            said = axis.outer * (facts.sequence - axis.removed) * axis.inner
            if sympy.expand(size - said) != 0:
                yield f"{node.name}: a dim of size {size} is said to be {said}"


def _masks(facts: Facts) -> Iterator[str]:
    """Who reads other rows is a node of the graph, and a window has a width."""
    nodes = set(facts.nodes)
    for node, mixing in facts.mixings.items():
        if node not in nodes or mixing.node is not node:
            yield f"{node.name} reads along the sequence and is not in the graph"
        if mixing.reach is Reach.WINDOW and mixing.window is None:
            yield f"{node.name} reads a window of no width"


def _segments(facts: Facts) -> Iterator[str]:
    """Segments partition what is streamed, and read what is there."""
    if not facts.segments:
        return
    nodes = set(facts.nodes)
    owner: dict[Node, Segment] = {}
    for segment in facts.segments:
        for node in segment.nodes:
            if node in owner:
                yield f"{node.name} is in segments {owner[node].index} and {segment.index}"
            owner[node] = segment
            if node not in nodes:
                yield f"{node.name}, of segment {segment.index}, is not in the graph"
    for segment in facts.segments:
        own = set(segment.nodes)
        for node in segment.outputs:
            if node not in own:
                yield f"{node.name} is an output of segment {segment.index} and not in it"
        for node in segment.rows:
            maker = owner.get(node)
            if maker is not None and maker.index >= segment.index:
                yield f"segment {segment.index} reads {node.name}, which segment {maker.index} makes"
        known = {*own, *segment.rows, *segment.constants, *segment.whole}
        for node in segment.nodes:
            for operand in operands(node):
                needed = facts.kinds.get(operand) is Kind.STREAM and operand in nodes
                if needed and operand not in known:
                    what = f"{node.name}, of segment {segment.index}"
                    yield f"{what}, reads {operand.name}, which it is not given"


def verify_program(graph: Graph, inputs: int, outputs: int) -> None:
    """Verify a chunk program after a pass over it: inputs and outputs are as many as before.

    Args:
        graph: the program.
        inputs, outputs: how many there were.

    Raises:
        UnsoundFacts: something is not so.
    """
    graph.lint()
    found = len(graph.find_nodes(op="placeholder"))
    returned = graph.output_node().args[0]
    if found != inputs or len(returned) != outputs:  # type: ignore[arg-type]
        raise UnsoundFacts(f"{found} inputs and {len(returned)} outputs, not {inputs} and {outputs}")  # type: ignore[arg-type]
