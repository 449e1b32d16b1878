"""chunk_program: the program of one chunk of a segment, from the segment's nodes.

A segment's nodes are evaluated again on the rows of a chunk. Each node has a role: ROW, on the chunk's own
rows, or COLUMN, on the columns the chunk reads. Between the two stands the state: values that are computed
once by rows, kept in a buffer, and read back as columns. Sizes that mention the sequence resolve by role.
"""

from __future__ import annotations

from torch.fx import Node

from ..graph.facts import Facts, Mask, Role, Segment
from ..rules.op_sets import VIEW_ONLY
from .carried_state import edges, find_states
from .provenance import Origins


class ChunkProgram:
    """Evaluates a segment on one chunk.

    Args:
        facts: what is known about the graph.
        segment: the segment.
        targets: nodes to compute, by rows.
        plain: masks that need not be built, since nothing but causality is left of them.
    """

    def __init__(
        self,
        facts: Facts,
        segment: Segment,
        targets: list[Node],
        plain: frozenset[Mask],
    ) -> None:
        self.facts, self.segment, self.targets, self.plain = facts, segment, targets, plain
        self.states = {s.node: s for s in find_states(facts, segment)}
        self.needed = self._demand()
        self.readers = self._count_readers()
        self.origins: Origins | None = None

    def _demand(self) -> list[tuple[Node, Role]]:
        """(node, role) pairs the targets need, in graph order, columns of a node after its rows."""
        inside, needed = set(self.segment.nodes), set()
        pending = [(n, Role.ROW) for n in self.targets]
        while pending:
            node, role = pending.pop()
            is_state = role is Role.COLUMN and node in self.states
            if (node, role) in needed or not (is_state or node in inside):
                continue
            needed.add((node, role))
            pending.extend([(node, Role.ROW)] if is_state else edges(self.facts, node, role))
        # a streamed input may be a state itself: its rows are given, its columns are read
        nodes = (*self.segment.rows, *self.segment.nodes)
        return [(n, r) for n in nodes for r in (Role.ROW, Role.COLUMN) if (n, r) in needed]

    def _count_readers(self) -> dict[Node, int]:
        """How many column operands come from each state."""
        count: dict[Node, int] = {}
        for node, role in self.needed:
            for operand, wanted in edges(self.facts, node, role):
                if wanted is Role.COLUMN and role is Role.ROW:
                    for state in self.sources(operand):
                        count[state] = count.get(state, 0) + 1
        return count

    def sources(self, node: Node) -> list[Node]:
        """The state that a node is a view of, in a list; an empty list if it is a view of none."""
        while node not in self.states and node.target in VIEW_ONLY:
            node = node.args[0]
        return [node] if node in self.states else []
