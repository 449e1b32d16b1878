"""reorder: what a program makes, it makes when somebody needs it.

A joint program is traced forwards and then backwards. Where attention outputs are kept, say, the queries that
it makes at once are read when the gradient has come through the feed-forward layer, and nobody needs them
until then. So ops move behind all that does not need them.
"""

from __future__ import annotations

from collections import defaultdict

import sympy
from torch.fx import Graph, Node

from ..cost.program import Memory
from ..graph.functionalization import written_operands
from ..graph.purity import is_impure, is_random


def reorder(graph: Graph) -> None:
    """Put the ops of a program in the order in which its effects need them, in place. Dead ops go.

    NOTE [what stays in order]: effects (writes into inputs, sums into them, what is returned) and random ops
    keep their order, and so do reads and writes of a storage that some op changes. Every other op stands
    before the first effect that needs it, among those that the same effect needs in the order that it had. An
    op does not wait if it is the last to read more than it makes: logits would be kept for a sum over them.
    """
    order = _Order(Memory(graph, {}))
    for node in order.memory.nodes:
        if is_impure(node) or is_random(node):
            order.place(node)
    for node in reversed(order.memory.nodes):
        if node not in order.placed:
            graph.erase_node(node)
    for before, node in zip(order.nodes, order.nodes[1:], strict=False):
        before.append(node)


class _Order:
    """The new order, as far as it is known.

    Attributes:
        nodes: those that have a place.
        needs: for each node of the program, those that must come before it; `needed_by`: the reverse.
        readers: of each storage, but for views.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.nodes: list[Node] = []
        self.placed: set[Node] = set()
        self.needs = _needs(memory)
        self.needed_by: dict[Node, list[Node]] = defaultdict(list)
        self.readers: dict[int, set[Node]] = defaultdict(set)
        for node in memory.nodes:
            for need in self.needs[node]:
                self.needed_by[need].append(node)
            for key in self._read(node):
                self.readers[key].add(node)

    def place(self, effect: Node) -> None:
        """An effect, what it needs, and what can run then and had better not wait."""
        new = found = self._missing(effect)
        while new:
            near = {n for f in new for n in self.needed_by[f]}
            near |= {n for f in new for key in self._read(f) for n in self.readers[key]}
            new = [m for n in sorted(near) if self._ready(n) and self._frees(n) for m in self._missing(n)]
            found = found + new
        self.nodes += sorted(found)

    def _missing(self, node: Node) -> list[Node]:
        found, pending = [], [node]
        while pending:
            node = pending.pop()
            if node not in self.placed:
                self.placed.add(node)
                found.append(node)
                pending.extend(self.needs[node])
        return found

    def _read(self, node: Node) -> set[int]:
        """Storages that an op reads, unless it only makes a view of them."""
        return set(self.memory.storages.read_by(node)) - set(self.memory.storages.of[node])

    def _ready(self, node: Node) -> bool:
        waits = node not in self.placed and not is_impure(node) and not is_random(node)
        return waits and all(n in self.placed for n in self.needs[node])

    def _frees(self, node: Node) -> bool:
        """True if an op makes less than what is let go after it, whatever the sizes are."""
        last = (k for k in self._read(node) if all(n is node or n in self.placed for n in self.readers[k]))
        gone = sum((self.memory.bytes[k] for k in last), sympy.S.Zero)
        made = sum((self.memory.bytes[k] for k in self.memory.storages.of[node]), sympy.S.Zero)
        return gone != 0 and bool(sympy.expand(gone - made).is_positive)


def _needs(memory: Memory) -> dict[Node, list[Node]]:
    """For each node, those that must come before it."""
    storages = memory.storages
    written = {n: {k for w in written_operands(n) for k in storages.of[w]} for n in storages.nodes}
    writer: dict[int, Node] = {}
    readers: dict[int, list[Node]] = defaultdict(list)
    needs: dict[Node, list[Node]] = {}
    for node in storages.nodes:
        needs[node] = list(node.all_input_nodes)
        for key in storages.changes.keys() & written[node].union(storages.read_by(node)):
            if key in writer:
                needs[node].append(writer[key])
            if key in written[node]:
                needs[node].extend(readers.pop(key, ()))
                writer[key] = node
            else:
                readers[key].append(node)
    return needs
