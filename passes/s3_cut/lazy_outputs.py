"""lazy_outputs: values that are an output next to a loss and wider than what they are made of are not stored.

They are the logits of a language model, found by their width and not by their name: a product with a
parameter, seen through ops by rows, that has more bytes a row than its operand. The runtime computes them
from the operand if somebody reads them.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.facts import Facts, Kind, operands
from .alive_bytes import row_bytes
from .segment import is_product, is_reduction


def lazy_outputs(facts: Facts, logits: str) -> Facts:
    """Take such values off the graph's outputs; `facts.lazy` keeps their positions.

    Args:
        logits: "keep" leaves every output as it is.
    """
    output, values = facts.module.graph.output_node(), facts.results
    losses = [n for n in values if isinstance(n, Node) and is_reduction(facts, n)]
    if logits == "keep" or not any(n in facts.needs_grad for n in losses):
        return facts
    for position, node in enumerate(facts.outputs):
        if isinstance(node, Node) and _is_wide(facts, node) and not _is_inner(facts, node):
            facts.lazy[position] = node
            values[position] = None
    output.args = (tuple(values),)
    return facts


def _is_inner(facts: Facts, node: Node) -> bool:
    """True if something is multiplied by a parameter, or mixed, that is made of a value: it is no logits."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user in facts.mixings or is_product(facts, user):
                return True
            if user not in seen and user.op != "output":
                seen.add(user)
                pending.append(user)
    return False


def _is_wide(facts: Facts, node: Node) -> bool:
    source = node
    random = torch.Tag.nondeterministic_seeded
    while facts.kinds.get(source) is Kind.STREAM and source not in facts.mixings:
        streamed = [n for n in operands(source) if facts.kinds[n] is Kind.STREAM]
        if len(streamed) != 1 or random in getattr(source.target, "tags", ()) or source in facts.not_linear:
            return False
        if is_product(facts, source):
            return row_bytes(facts, node) > row_bytes(facts, streamed[0])
        source = streamed[0]
    return False
