"""saved_values: which values a chunk's forward saves for its backward, and which the backward computes again.

A joint program computes the forward of a chunk again and differentiates it. What its forward half makes and
its backward half reads may be saved instead. A saved byte has a price in operations, and the values for which
price and operations together are least are found as a minimum cut of the forward half: each value is computed
again, is saved, or is not needed. (So does PyTorch's partitioner choose what an unchunked graph saves: He and
Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx
import sympy
import torch
from torch.fx import GraphModule, Node

from ..cost.program import tensor_bytes, work_of
from ..cost.storages import Storages
from ..cost.work import flops_of
from ..graph.facts import tensors_of
from ..graph.functionalization import changes_something
from ..graph.symbols import in_numbers
from ..step.saving import Price

# What an elementwise op costs: operations of a product that a device does while it reads or writes a byte.
OPERATIONS_PER_BYTE = {"cpu": 16, "cuda": 128}
# The rows of a chunk for which operations and bytes are counted, and two lengths that tell what grows.
ROWS, FAR = 2048, 2**20
AGAIN, BACKWARD = "computed again", "backward"

Names = Mapping[sympy.Symbol, str]


@dataclass(frozen=True)
class ForwardHalf:
    """What a joint program computes before it reads any gradient, as far as the rest of it needs that.

    Attributes:
        nodes: its ops, in order.
        read: those that the rest reads or returns.
        savable: those that a forward can save: they make memory of their own, whose size the rows of the
            chunk alone decide, and nothing changes it.
        names: of the size symbols.
    """

    nodes: list[Node]
    read: frozenset[Node]
    savable: frozenset[Node]
    names: Names
    _work: dict[int | None, dict[Node, int]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(module: GraphModule, live: set[Node], gradients: Iterable[Node], names: Names) -> ForwardHalf:
        """
        Args:
            module: a joint program.
            live: its nodes that its results are made of.
            gradients: its inputs that are gradients, or sums of them.
            names: of its size symbols.
        """
        behind = set(gradients)
        storages, nodes = Storages(module.graph), []
        for node in module.graph.nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
            elif node.op == "call_function" and node in live and tensors_of(node):
                nodes.append(node)
        nodes = [n for n in nodes if not changes_something(n)]
        inside = set(nodes)
        read = frozenset(n for n in nodes if any(u in live and u not in inside for u in n.users))
        fixed = {s for s, name in names.items() if name not in ("prefix", "low", "total")}
        savable = frozenset(n for n in nodes if _is_savable(n, storages, fixed))
        return ForwardHalf(nodes, read, savable, names)

    def operations(self, prefix: int | None) -> dict[Node, int]:
        """What it takes to compute each value again, in operations; 0 for a view.

        Args:
            prefix: rows before the chunk. None: only what grows faster than the sequence counts.
        """
        if prefix not in self._work:
            self._work[prefix] = {n: _operations(n, prefix, self.names) for n in self.nodes}
        return self._work[prefix]

    @cached_property
    def bytes(self) -> dict[Node, int]:
        """What each value takes that can be saved."""
        return {n: _number(tensor_bytes(n.meta["val"]), self.names, ROWS, 0) for n in self.savable}


def _is_savable(node: Node, storages: Storages, fixed: set[sympy.Symbol]) -> bool:
    keys, value = storages.of[node], node.meta["val"]
    if not isinstance(value, torch.Tensor) or len(keys) != 1 or keys[0] in storages.changes:
        return False
    maker = storages.maker(keys[0])
    several = not isinstance(maker.meta.get("val"), torch.Tensor)
    makes = maker is node or (several and maker.op == "call_function" and maker in node.all_input_nodes)
    return makes and tensor_bytes(value).free_symbols <= fixed


def saved_values(half: ForwardHalf, price: Price) -> list[Node]:
    """The values that are saved at a price, in the order in which they are made.

    A value has two ends. It is computed again if both are on the side of the backward, saved if the cut is
    between them, and not needed otherwise; what is computed again needs its operands on that side as well.
    """
    graph, inside, again = networkx.DiGraph(), set(half.nodes), half.operations(price.prefix)
    for node in half.nodes:
        into, out = (node, "in"), (node, "out")
        graph.add_edge(AGAIN, into, capacity=again[node])
        bounds = {"capacity": int(price.operations * half.bytes[node])} if node in half.savable else {}
        graph.add_edge(into, out, **bounds)  # without a capacity it is never cut
        graph.add_edges_from(((o, "out"), into) for o in node.all_input_nodes if o in inside)
        if node in half.read:
            graph.add_edge(out, BACKWARD)
    if BACKWARD not in graph:
        return []
    _, (above, below) = networkx.minimum_cut(graph, AGAIN, BACKWARD)
    return [n for n in half.nodes if (n, "in") in above and (n, "out") in below]


def computed_again(half: ForwardHalf, saved: Iterable[Node]) -> list[Node]:
    """What the backward computes again where some values are saved, in order."""
    known, needed = set(saved), set(half.read)
    for node in reversed(half.nodes):
        if node in needed and node not in known:
            needed.update(node.all_input_nodes)
    return [n for n in half.nodes if n in needed and n not in known]


def _operations(node: Node, prefix: int | None, names: Names) -> int:
    if prefix is not None:
        return _number(operations_of(node), names, ROWS, prefix)
    products = flops_of(node)
    return max(0, _number(products, names, 2 * FAR, 2 * FAR) - 2 * _number(products, names, FAR, FAR))


def operations_of(node: Node) -> sympy.Expr:
    """Operations of a node in the sizes of its graph: those of products and attention, and for each byte that
    is read or written as many as a device could do meanwhile."""
    work = work_of(node)
    return work.flops + (work.product_bytes + work.bytes) * operations_per_byte(node)


def operations_per_byte(node: Node) -> int:
    """How many operations of a product the device of a value does while it reads or writes a byte."""
    return OPERATIONS_PER_BYTE.get(tensors_of(node)[0].device.type, 128)


def _number(size: Any, names: Names, rows: int, prefix: int) -> int:
    """A size for a chunk with so many rows before it; other sizes are taken to be 1."""
    known = {"rows": rows, "prefix": prefix, "low": 0, "total": rows + prefix}
    size = sympy.sympify(size)
    return in_numbers(size, {s: known[names[s]] for s in size.free_symbols if names.get(s) in known})
