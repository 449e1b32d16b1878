"""Results of a loop of which the gradients go different ways: each kind has a loop of its own.

NOTE [results of a loop]: the op makes one tensor of all results of a row, so a gradient of one of them is a
gradient of all that the op reads, zeros mostly. In eager what only other results are made of has none then:
an optimizer leaves it alone, and moves what has zeros. So results that read other operands with a gradient
come from another op, which computes again what they share. What nobody reads is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...graph.subgraph import made_of
from .body import LoopBody, Size, reached, shared_dims


@dataclass(frozen=True)
class LoopPart:
    """A loop that makes some of the results.

    Attributes:
        body: of the loop.
        operands: of the op; those that have no gradient are detached.
        results: which of the results of the whole loop.
    """

    body: LoopBody
    operands: list[Tensor]
    results: list[int]


def parts_of(
    body: LoopBody, operands: Sequence[Tensor], results: Sequence[Tensor], read: Iterable[int]
) -> Iterator[LoopPart]:
    """Loops that make the results together.

    Args:
        body: of the loop.
        operands: of the op.
        results: of one row, of which only shapes and dtypes are looked at.
        read: those that somebody reads.
    """
    kinds: dict[tuple[bool, ...], list[int]] = {}
    ways = reached(body, operands)
    for k in read:
        kinds.setdefault(tuple(ways[k]), []).append(k)
    for way, chosen in kinds.items():
        given = [x if known else x.detach() for x, known in zip(operands, way, strict=True)]
        own, kept = _restricted(body, chosen)
        own = replace(own, shared=shared_dims([results[k] for k in chosen]))
        yield LoopPart(own, [given[k] for k in kept], chosen)


def _restricted(body: LoopBody, chosen: Sequence[int]) -> tuple[LoopBody, list[int]]:
    """A body that makes some of its results, with the states that these need; and which operands it has."""
    given = [n for n in body.module.graph.nodes if n.op == "placeholder"]
    made = _results(body.module)
    own = len(made) - body.carried
    results, last = [k for k in chosen if k < own], [body.last[k - own] for k in chosen if k >= own]
    sizes = {s.operand - body.by_rows for s in body.rest if isinstance(s, Size)}
    kept = {k for k in range(body.carried) if k in last or k in sizes} or {0}  # a loop has a state
    while True:  # what a state is made of is a state, too
        needed = made_of([*(made[body.carried + k] for k in results), *(made[k] for k in kept)])
        more = {k for k in range(body.carried) if given[k] in needed} - kept
        if not more:
            break
        kept |= more
    states = sorted(kept)
    dropped = [k for k in range(body.carried) if k not in kept]
    read = [*states, *(body.carried + k for k in results)]
    module = _with_results(body.module, read, dropped)
    first = None if body.first is None else _with_results(body.first, read, dropped)
    places = [*range(body.by_rows), *(body.by_rows + k for k in states)]
    others = sum(kind is None for kind in body.rest)
    places += range(body.by_rows + body.carried, body.by_rows + body.carried + others)
    rest = tuple(Size(places.index(s.operand), s.dim) if isinstance(s, Size) else s for s in body.rest)
    position = {k: place for place, k in enumerate(states)}
    read_last = tuple(position[k] for k in last)
    return LoopBody(module, len(states), body.by_rows, rest, read_last, first=first), places


def _results(module: GraphModule) -> list[Node]:
    return list(next(n for n in module.graph.nodes if n.op == "output").args[0])  # type: ignore[arg-type]


def _with_results(module: GraphModule, read: Sequence[int], dropped: Sequence[int]) -> GraphModule:
    """A body that returns some of its results, and does not take some of the carried values."""
    made = _results(module)
    chosen, taken = [made[k] for k in read], [n for n in module.graph.nodes if n.op == "placeholder"]
    needed, unread = made_of(chosen), {taken[k] for k in dropped}
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node in needed or (node.op == "placeholder" and node not in unread):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in chosen))
    return GraphModule(module, graph)
