"""Outputs of a graph of which others of its values are made: hidden states that a hook or a module keeps.

NOTE [gradients of hidden states]: somebody may take the gradient of the loss with respect to such a value,
hang a hook on it or have it keep its gradient, and eager gives what comes from all that is made of it. Inside
of a segment nobody has that gradient. So the graph is cut behind the value: what is made of it is made by
other segments, and their gradients come to it through autograd. Where no cut is possible the graph is not
streamed.
"""

from __future__ import annotations

from torch.fx import Node

from ..graph.facts import Facts, Kind
from ..graph.refusals import NotPureError


def shown(facts: Facts) -> set[Node]:
    """Values that the graph returns, that have a gradient, and of which others that have one are made."""
    made = (n for n in facts.outputs if isinstance(n, Node) and n.op == "call_function")
    return {n for n in made if is_shown(facts, n)}


def is_shown(facts: Facts, node: Node) -> bool:
    """True for an output that has a gradient and of which others that have one are made."""
    return node in facts.needs_grad and bool(_readers(facts, node))


def refuse_weights(facts: Facts) -> None:
    """Raise if such a value is made of parameters alone: each segment makes it anew.

    Raises:
        NotPureError: it is.
    """
    for node in shown(facts):
        if facts.kinds[node] is Kind.CONSTANT:
            raise NotPureError("a value that is made of parameters is used and returned as well", node)


def refuse_inner(facts: Facts) -> None:
    """Raise if such a value is read within the segment that makes it.

    Raises:
        NotPureError: it is.
    """
    place = {n: s.index for s in facts.segments for n in s.nodes}
    for node in shown(facts):
        if node in place and any(place.get(u) == place[node] for u in _readers(facts, node)):
            raise NotPureError("a value that is returned is used as well where the graph cannot be cut", node)


def _readers(facts: Facts, node: Node) -> list[Node]:
    return [n for n in node.users if n in facts.needs_grad]
