"""rematerialize: elementwise values that would be alive at a program's peak are made again after it.

A norm's result is read by the products behind it and, when the gradient comes back, by the gradients of their
weights. Between the two a chunk's body holds the most, and to make it again from what is held anyway is one
pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, Node

from ..cost.program import tensor_bytes
from ..cost.storages import Storages
from ..graph.facts import tensors_of
from ..graph.functionalization import changes_something
from ..graph.purity import is_impure, is_random
from ..graph.symbols import in_numbers
from .rewriting import evaluate
from .write_in_place import in_place_form

# The chunk for which the peak is looked for: the last of four.
ROWS, PREFIX = 2048, 6144
# At most so many values of a program are made again; fewer if it has very many ops.
LIMIT, OPS = 100, 50_000


def typical(names: Mapping[sympy.Symbol, str], window: int | None) -> dict[sympy.Symbol, int]:
    """Sizes of a chunk for which the peak of a program is looked for.

    Args:
        names: of the program's size symbols: "rows", "prefix", "low", "total", or another: that is 1.
        window: how many rows a row reads at most, or None.
    """
    prefix = PREFIX if window is None else min(PREFIX, window - 1)
    known = {"rows": ROWS, "prefix": prefix, "low": PREFIX - prefix, "total": ROWS + PREFIX}
    return {symbol: known.get(name, 1) for symbol, name in names.items()}


def rematerialize(graph: Graph, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Make elementwise values again where that lowers the peak of a program, in place.

    NOTE [made again]: the op runs a second time on the same operands, so the bits are the same. It must be
    elementwise and not random, its operands must be held anyway where it runs again (or be made again there
    themselves), and no op may change them. Values that somebody reads at the peak stay.

    Args:
        graph: of a traced program, in the order in which it will run.
        sizes: for which the peak is looked for; a symbol that is not there is taken to be 1.
    """
    program = _Program(graph, sizes)
    peaks, steps = [program.peak], []
    for _ in range(min(LIMIT, OPS // len(program.nodes))):
        step = program.lower_peak()
        if step is None:
            break
        program = _Program(graph, sizes, program.bytes)
        peaks.append(program.peak)
        steps.append(step)
    for step in reversed(steps[peaks.index(min(peaks)) :]):  # these lowered nothing any more
        step.undo()
    graph.eliminate_dead_code(is_impure_node=is_impure)


@dataclass
class _Step:
    """A value that was made again: whose operands changed, from what to what, and what was added."""

    moved: list[tuple[Node, Node, Node]] = field(default_factory=list)
    added: list[Node] = field(default_factory=list)

    def undo(self) -> None:
        for reader, old, new in reversed(self.moved):
            reader.replace_input_with(new, old)
        for node in reversed(self.added):
            node.graph.erase_node(node)


@dataclass
class _Program:
    """The storages of a program, and what is alive when.

    Attributes:
        bytes: of each storage that is made inside, at the given sizes.
        peak, at: the most bytes that are alive at once, and the position of the op where they are.
    """

    graph: Graph
    sizes: Mapping[sympy.Symbol, int]
    bytes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storages = Storages(self.graph)
        self.nodes, self.position = self.storages.nodes, self.storages.position
        for key, value in self.storages.first.items():
            if not self.storages.is_inside(key):
                self.bytes[key] = 0
            elif key not in self.bytes:
                size = sympy.sympify(tensor_bytes(value))
                self.bytes[key] = in_numbers(size, self.sizes)
        self._ignore_what_nobody_reads()
        self.peak, self.at = self._most()

    def _ignore_what_nobody_reads(self) -> None:
        """What nobody reads any more is there for `undo`, and reads nothing."""
        idle: set[Node] = set()
        for node in reversed(self.nodes):
            repeats = self.storages.is_view(node) or _is_elementwise(node)
            if idle.issuperset(node.users) and repeats and not changes_something(node):
                idle.add(node)
        self.storages.ignore_readings_of(idle)

    def _most(self) -> tuple[int, int]:
        live = self.storages.alive(self.bytes, 0)
        return max((total - self._written_over(k), k) for k, total in enumerate(live))

    def _written_over(self, position: int) -> int:
        """Bytes of an operand in whose place an op will write its result, see `write_in_place`."""
        node = self.nodes[position]
        if in_place_form(node) is None or len(self.storages.of[node]) != 1:
            return 0
        size = self.bytes[self.storages.of[node][0]]
        dying = (k for k in self.storages.read_by(node) if self.storages.last(k) == position)
        return size if any(self.bytes[k] == size for k in dying) else 0

    # ---- what is made again

    def lower_peak(self) -> _Step | None:
        """Make one value again that is alive at the peak and not read there; None if there is none."""
        found = [n for n in self.nodes[: self.at] if self._may_go(n)]
        for node in sorted(found, key=lambda n: (-self.bytes[self.storages.of[n][0]], -self.position[n])):
            readers = self._later_readers(node)
            place = min(readers, key=self.position.__getitem__)
            if self._operands_are_there(node, self.position[place]):
                return self._again(node, readers, place)
        return None

    def _may_go(self, node: Node) -> bool:
        if not _is_elementwise(node) or len(self.storages.of[node]) != 1:
            return False
        (key,) = self.storages.of[node]
        if key in self.storages.changes or self.storages.maker(key) is not node or not self.bytes[key]:
            return False
        reads = self.storages.readers[key]
        returned = len(self.nodes) - 1 in reads
        return not returned and self.at not in reads and any(k > self.at for k in reads)

    def _operands_are_there(self, node: Node, place: int) -> bool:
        keys = self.storages.read_by(node)
        return not self.storages.changes.keys() & keys and all(
            not self.storages.is_inside(k) or self.storages.last(k) >= place for k in keys
        )

    def _later_readers(self, node: Node) -> list[Node]:
        """Ops after the peak that read a value or a view of it; views are not among them."""
        key = self.storages.of[node][0]
        reads = (self.nodes[k] for k in sorted(self.storages.readers[key]) if k > self.at)
        return [n for n in reads if key not in self.storages.of[n]]

    def _again(self, node: Node, readers: Iterable[Node], place: Node) -> _Step:
        step, again = _Step(), {}  # type: tuple[_Step, dict[Node, Node]]
        views = {n for n, keys in self.storages.of.items() if keys == self.storages.of[node]}

        def copy(own: Node) -> Node:
            if own not in again:
                if own is not node:
                    copy(own.args[0])  # type: ignore[arg-type]
                with self.graph.inserting_before(place):
                    again[own] = self.graph.node_copy(own, lambda n: again.get(n, n))
                evaluate(again[own])
                step.added.append(again[own])
            return again[own]

        for reader in readers:
            for operand in [n for n in reader.all_input_nodes if n in views]:
                reader.replace_input_with(operand, copy(operand))
                step.moved.append((reader, operand, copy(operand)))
        return step


def _is_elementwise(node: Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.pointwise not in op.tags:
        return False
    return len(tensors_of(node)) == 1 and not op._schema.is_mutable and not op.is_view and not is_random(node)
