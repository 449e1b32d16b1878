"""storages: where the tensors of a program lie; who makes, reads and changes that memory, and until when.

Every pass that moves, repeats, overwrites or counts memory asks here.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.facts import tensors_of
from ..graph.functionalization import written_operands
from ..graph.ops.recurrence import RECURRENCE_KEPT_VJP

Bytes = TypeVar("Bytes")


class Storages:
    """The storages of a program's values, as its fake tensors share them.

    NOTE [results of changes in place]: an op that writes over an operand was often traced as one that makes a
    tensor of its own, and later views were traced as views of that. What lies in the traced result's storage
    lies in the operand's.

    Args:
        graph: of ATen ops whose nodes carry fake tensors in `meta["val"]`.

    Attributes:
        nodes: of the graph; `position` is the place of each.
        of: of each node, the storages that its tensors lie in, by number.
        made: position of the op that makes a storage, or of the input that it is.
        readers: positions of the ops that read a storage, in order.
        first: of each storage the first tensor that lies in it, which tells its size.
        changes: the last op that writes over a storage.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = list(graph.nodes)
        self.position = {n: k for k, n in enumerate(self.nodes)}
        self.of: dict[Node, tuple[int, ...]] = {}
        self.made: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.first: dict[int, Tensor] = {}
        self.changes: dict[int, Node] = {}
        self._lies_in: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            self._place(position, node)
            for key in self.read_by(node):
                self.readers[key].append(position)

    def _place(self, position: int, node: Node) -> None:
        values = tensors_of(node)
        written = written_operands(node)
        for operand in written:
            self.changes.update(dict.fromkeys(self.of[operand], node))
        if written and _returns_what_it_writes(node):
            keys = [k for operand in written for k in self.of[operand]]
            self._lies_in.update((storage_of(v), k) for v, k in zip(values, keys, strict=False))
        self.of[node] = tuple(map(self.number, values))
        if node.target is operator.getitem:  # one of the results of an op, which has made all memory there is
            self.of[node] = self._among(node, self.of[node], self.of[node.args[0]])  # type: ignore[index]
        for key, value in zip(self.of[node], values, strict=True):
            if key not in self.made:
                self.made[key], self.readers[key], self.first[key] = position, [], value

    def _among(self, node: Node, own: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
        """The storages of a result that was traced before its op was made anew: those of the op."""
        if set(own) <= set(given) or len(own) != 1:
            return own
        index = node.args[1]
        found = given[index] if isinstance(index, int) and -len(given) <= index < len(given) else given[0]
        self._lies_in[own[0]] = found
        return (found,)

    def number(self, value: Tensor) -> int:
        """The number of the storage that a (fake) tensor of any shape and dtype lies in.

        The program need not have had the tensor when this was made.
        """
        key = storage_of(value)
        return self._lies_in.get(key, key)

    def read_by(self, node: Node) -> dict[int, None]:
        """The storages of a node's operands, each once, in order; and those that a record of a step reads."""
        nodes = list(node.all_input_nodes)
        if node.target is RECURRENCE_KEPT_VJP:  # operands of the step, whatever stands for them here
            nodes += node.args[-1].args[0].all_input_nodes  # type: ignore[union-attr]
        return dict.fromkeys(k for n in nodes for k in self.of[n])

    def maker(self, key: int) -> Node:
        """The op that makes a storage, or the input or constant that it is."""
        return self.nodes[self.made[key]]

    def is_inside(self, key: int) -> bool:
        """True if an op of the program makes a storage: it is no input and no constant."""
        return self.maker(key).op == "call_function"

    def is_view(self, node: Node) -> bool:
        """True if a node makes no storage for some of what it returns."""
        return any(self.made[k] != self.position[node] for k in self.of[node])

    def last(self, key: int) -> int:
        """Position of the last op that reads a storage, or that makes it."""
        return self.readers[key][-1] if self.readers[key] else self.made[key]

    def ends(self, value: Node, reader: Node) -> bool:
        """True if one op made a value's memory, for it alone, and `reader` is the last to read it, once."""
        keys = self.of[value]
        if len(keys) != 1 or not self.is_inside(keys[0]) or self.last(keys[0]) != self.position[reader]:
            return False
        if len(self.of[self.maker(keys[0])]) != 1:
            return False
        return sum(keys[0] in self.of[n] for n in _readings(reader)) == 1

    def take(self, value: Node, result: Node) -> None:
        """The result lies in the value's memory from now on."""
        (old,), (new,) = self.of[value], self.of[result]
        for node, keys in self.of.items():
            if new in keys:
                self.of[node] = tuple(old if k == new else k for k in keys)
        self.readers[old] = sorted({*self.readers[old], *self.readers.pop(new)})
        del self.made[new], self.first[new]

    def ignore_readings_of(self, nodes: Iterable[Node]) -> None:
        """What these nodes read does not count any more."""
        ignored = {self.position[n] for n in nodes}
        for key, positions in self.readers.items():
            self.readers[key] = [k for k in positions if k not in ignored]

    def alive(self, sizes: Mapping[int, Bytes], zero: Bytes) -> Iterator[Bytes]:
        """Bytes that are held when each op has just run, its operands among them.

        Args:
            sizes: bytes of each storage.
            zero: no bytes, as a number or an expression.
        """
        change = [zero] * (len(self.nodes) + 1)
        for key, made in self.made.items():
            change[made] = change[made] + sizes[key]  # type: ignore[operator]
            change[self.last(key) + 1] = change[self.last(key) + 1] - sizes[key]  # type: ignore[operator]
        return itertools.accumulate(change[:-1])


def _returns_what_it_writes(node: Node) -> bool:
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return bool(returns) and all(r.alias_info is not None and r.alias_info.is_write for r in returns)


def storage_of(value: Tensor) -> int:
    """A number for the storage of a (fake) tensor of any shape and dtype: the same for views of it."""
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # the inner wrapper of a functorch level, whose storage cannot be asked for
        return id(value)


def _readings(node: Node) -> list[Node]:
    """Operands of a node, as often as it reads them."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found
