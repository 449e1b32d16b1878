"""Bodies of loops that change a tensor in place, in eager; here they compute a new one.

NOTE [changed in place]: `h += x` changes the tensor for all who know it. Where that shows in the results of a
row, the comparison of a few rows with the loop sees it. It does not see a tensor that is handed on from
variable to variable, once a row, and is read where it arrives after many rows. So no variable that is carried
from row to row may be, or be a view of, a tensor that is changed by another name, not at the beginning
either, and nothing may be read by an old name once it is changed. Which values are views of one another is
seen on tensors without numbers, on which the body is run as eager does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from ...graph.facts import expression
from .first_row import halves


class SharedChange(Exception):
    """What a loop changes in place may be carried by another name, too."""


@torch.compiler.allow_in_graph
def changed_to(old: Tensor, new: Tensor) -> Tensor:
    """The new value of a tensor that is changed in place, in the place of it.

    Args:
        old, new: of one shape, dtype and device.

    Raises:
        TypeError: they are not.
    """
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        raise TypeError("a tensor is changed in place to one of another shape or dtype")
    return new.clone()


def refuse_shared(
    body: GraphModule, begin: Sequence[Tensor], rows: Sequence[Tensor], rest: Sequence[Any]
) -> None:
    """See to it that nobody else knows of what a loop changes in place.

    Args:
        body: of a scan, as Dynamo has traced it.
        begin, rows, rest: what it is given, of any shape and dtype, without numbers.

    Raises:
        SharedChange: somebody may.
    """
    if not any(n.target is changed_to for n in body.graph.nodes):
        return
    first, other = halves(body)
    own = [*map(_alike, begin), *(_alike(x, 1) for x in rows), *map(_alike, rest)]
    last = _Run(other, own, len(begin), first is None)
    kept = last.changed_later()
    last.refuse_carried(kept, lambda place: False)
    alone = {k for k in kept if first is None}
    if first is not None:
        rest_from = len(begin) + len(rows)
        unread = {k for k, n in enumerate(_placeholders(other)) if not n.users and k >= rest_from}
        begins = _Run(first, own, len(begin), False)
        begins.refuse_carried(kept, unread.__contains__)
        own_places = {*begins.changes, *(begins.places[k] for k in kept)}
        alone |= {k for k, x in enumerate(begins.given) if _memory(x) in own_places}
    given = [_memory(x) for x in (*begin, *rows, *rest)]
    if any(given[k] is not None and given.count(given[k]) > 1 for k in alone):
        raise SharedChange("what it changes in place is known by another name when it begins")


def _memory(value: Any) -> int | None:
    """Where a tensor lies; views of it lie there, too."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class _Run(Interpreter):
    """A body is run on tensors without numbers, and nothing may read what it has changed by another name.

    Attributes:
        given: what it is run on: what is carried, rows, and the rest.
        changes: how often it changes what lies in a place.
        places: where the values lie that it returns for the next row.
    """

    def __init__(self, module: GraphModule, given: Sequence[Any], carried: int, copies: bool) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.changes: Counter[int | None] = Counter()
        self.seen: dict[Node, int] = {}
        results = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
        self.copied = {*results[carried:]} if copies else set()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes(), self.mode, torch.no_grad():
            self.given = [x() if callable(x) else x for x in given]
            self.run(*self.given)
        is_copy = lambda n: copies and n.target in ("clone", torch.clone)  # noqa: E731
        results = [n.args[0] if is_copy(n) else n for n in results[:carried]]
        for node in results:
            self._look(node)
        self.places = [_memory(self.env[n]) for n in results]

    def run_node(self, n: Node) -> Any:
        if n.op != "output" and n not in self.copied:
            for node in n.all_input_nodes:
                self._look(node)
        if n.target is changed_to:
            (found, _), _ = self.fetch_args_kwargs_from_env(n)
            self.changes[_memory(found)] += 1
        else:
            found = super().run_node(n)
        self.seen[n] = self.changes[_memory(found)]
        return found

    def _look(self, node: Node) -> None:
        if self.seen[node] != self.changes[_memory(self.env[node])]:
            raise SharedChange("what it changes in place is read by another name")

    def changed_later(self) -> set[int]:
        """Which carried values the body changes, or hands on to where it changes them."""
        given = [_memory(x) for x in self.given[: len(self.places)]]
        found = {k for k, m in enumerate(given) if m in self.changes}
        while True:
            handed_on = {self.places[k] for k in found}
            more = {k for k, m in enumerate(given) if m in handed_on} - found
            if not more:
                return found
            found |= more

    def refuse_carried(self, kept: set[int], may_begin: Callable[[int], bool]) -> None:
        """Carried values that are changed must be known by one name alone.

        Args:
            kept: those that a later row changes.
            may_begin: whether what is given in a place may become one of them.

        Raises:
            SharedChange: they are not.
        """
        count, given = Counter(self.places), [_memory(x) for x in self.given]
        if any(count[m] > 1 for m in {*self.changes, *(self.places[k] for k in kept)}):
            raise SharedChange("what it changes in place is carried by two names")
        for k in kept:
            places = [j for j, m in enumerate(given) if m == self.places[k] and j >= len(self.places)]
            if not all(map(may_begin, places)):
                raise SharedChange("what it changes in place is known by another name")


def _placeholders(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _alike(value: Any, skipped: int = 0) -> Any:
    """Makes a tensor of these sizes, without the first dims; where a size is a symbol, for 2 in its place."""
    if isinstance(value, torch.SymInt):
        return _size(value)
    if not isinstance(value, Tensor):
        return value
    sizes = [_size(s) for s in value.shape[skipped:]]
    return lambda: torch.empty(sizes, dtype=value.dtype, device=value.device)


def _size(size: int | torch.SymInt) -> int:
    found = expression(size)
    return int(found.subs(dict.fromkeys(found.free_symbols, 2)))


def without_marks(graph: torch.fx.Graph) -> None:
    """Put the new value itself in the place of `changed_to`."""
    for node in list(graph.nodes):
        if node.target is changed_to:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
