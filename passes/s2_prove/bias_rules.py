"""Transfer functions of ops that make a bias of a table of parameters: see NOTE [places]."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .scores import CASTS, ORDINARY, Call, Score, Scores, is_view, transfer

aten = torch.ops.aten


@transfer(aten.embedding.default, aten.index.Tensor)
def looked_up(scores: Scores, node: Node, call: Call) -> Score | None:
    """Numbers of a parameter at places that data says. What else a table is made of may be infinite."""
    return ORDINARY if node in scores.facts.mixings and is_parameter(scores, node.args[0]) else None


def is_parameter(scores: Scores, node: Any) -> bool:
    """True for a parameter, also under another shape or in another dtype."""
    while isinstance(node, Node) and node.op == "call_function" and (is_view(node) or node.target in CASTS):
        node = node.args[0]
    return node in scores.facts.parameters
