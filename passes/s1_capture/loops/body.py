"""The body of a loop along the sequence as a step with a state, for the op `streambp_fx::recurrence`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ...graph.autograd_functions import Retrace, content_of
from ...graph.facts import expression
from ...graph.functionalization import changes_something
from ...graph.ops.recurrence import RECURRENCES, Recurrence
from ...graph.purity import is_random
from ...graph.refusals import NotPureError
from ...graph.tracing import trace
from ..refused_effects import refuse_effects, refuse_regions, refuse_strides
from .in_place import without_marks


class LoopNotUnderstood(Exception):
    """A loop is no step with a state that could be taken from one chunk of rows to the next."""


@dataclass(frozen=True)
class Size:
    """A size that the body of a loop reads, as that of an operand in a dim."""

    operand: int
    dim: int


@dataclass(frozen=True)
class LoopBody:
    """What a loop does with one row.

    The operands of the op are the values that go by rows (the rows in dim 0), those that the carried values
    begin with, and what is the same for all rows.

    Attributes:
        module: takes the carried values, a row of each value that goes by rows, and the rest; returns the
            carried values for the next row, and the results of this one.
        carried, by_rows: how many there are.
        rest: what else the body takes: None for the next operand, a `Size`, or a number.
        last: which carried values somebody reads after the loop. They are results of each row, too.
        shared: how many first dims have the same sizes in all results of a row.
        first: what is done with the first row, if that is something else: takes and returns the same.
    """

    module: GraphModule
    carried: int
    by_rows: int
    rest: tuple[Size | int | float | None, ...]
    last: tuple[int, ...]
    shared: int = 0
    first: GraphModule | None = None

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The operands by rows, what the carried values begin with, and the rest."""
        rows, begin = list(operands[: self.by_rows]), list(operands[self.by_rows :][: self.carried])
        others = iter(operands[self.by_rows + self.carried :])
        return rows, begin, [self._given(kind, operands, others) for kind in self.rest]

    @staticmethod
    def _given(kind: Size | int | float | None, operands: Sequence[Any], others: Any) -> Any:
        if kind is None:
            return next(others)
        return operands[kind.operand].shape[kind.dim] if isinstance(kind, Size) else kind

    def call(
        self, carried: Sequence[Any], row: Sequence[Any], rest: Sequence[Any], begins: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The carried values after a row, in the shapes and dtypes of those before, and the results of it.

        Args:
            carried, row, rest: what the body takes.
            begins: this is the first row.
        """
        module = self.module if self.first is None or not begins else self.first
        return self.parts(module.forward(*carried, *row, *rest))

    def parts(self, found: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What the body returns: the carried values, of any shape and dtype, and all results of the row."""
        after = list(found[: self.carried])
        return after, [*found[self.carried :], *(after[k] for k in self.last)]

    def results_of(self, operands: Sequence[Any]) -> list[Tensor]:
        """The results of one row, of which only shape and dtype are looked at; nothing is differentiated."""
        rows, begin, rest = self.split(operands)
        with torch.no_grad():
            return self.call(begin, [x.new_empty(x.shape[1:]) for x in rows], rest)[1]

    def joined(self, results: Sequence[Tensor]) -> Tensor:
        """The results of a row as one tensor, beside one another in the last dim; its dtype holds all."""
        if len(results) == 1:
            return results[0]
        flat = (x.flatten(self.shared) if x.dim() > self.shared else x.unsqueeze(-1) for x in results)
        dtype = common_dtype(results)
        return torch.cat([x.to(dtype) for x in flat], -1)

    def step(
        self, operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loop over the rows that are given, (T, ...), as `Recurrence.step`."""
        rows, begin, rest = self.split(operands)
        carried = begin if state is None else unpacked(state, begin)
        made = []
        begins = self.first is not None and not has_begun(state)
        for k, row in enumerate(zip(*(x.unbind(0) for x in rows), strict=True)):
            carried, results = self.call(carried, row, rest, begins and k == 0)
            made.append(self.joined(results))
        return torch.stack(made), packed(carried)

    def sizes(self, operands: Sequence[Any]) -> list[Any]:
        """Those of what the op makes."""
        return [operands[0].shape[0], *self.joined(self.results_of(operands)).shape]

    def state_sizes(self, operands: Sequence[Any]) -> list[Any]:
        """Those of the state."""
        return [1 + sum(x.numel() for x in self.split(operands)[1])]


def packed(carried: Sequence[Tensor]) -> Tensor:
    """NOTE [the state of a loop]: one dim, of a 1 and all entries of the carried values.

    Before the first chunk a state is zeros. So its first entry says whether the loop has begun; until then
    the carried values are what the loop begins with, which are operands, and may have a gradient.
    """
    dtype = common_dtype(carried)
    return torch.cat([carried[0].new_ones(1, dtype=dtype), *(x.reshape(-1).to(dtype) for x in carried)])


def has_begun(state: Tensor | None) -> bool:
    """True if a state, of one dim, is one after some rows.

    A state without numbers is taken for one: most chunks are not the first.
    """
    if state is None or isinstance(state, FakeTensor) or state.is_meta:
        return state is not None
    return bool(state.detach()[0] != 0)


def unpacked(state: Tensor, begin: Sequence[Tensor]) -> list[Tensor]:
    """The carried values in a state, in the shapes and dtypes of `begin`; that, where nothing has begun."""
    has_begun, *entries = state.split([1, *(x.numel() for x in begin)])
    pairs = zip(entries, begin, strict=True)
    return [torch.where(has_begun != 0, e.view(b.shape).to(b.dtype), b) for e, b in pairs]


def common_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """A dtype that holds values of all these as they are."""
    return functools.reduce(torch.promote_types, (x.dtype for x in values))


def shared_dims(results: Sequence[Tensor]) -> int:
    """How many of their first dims have the same sizes in all."""
    sizes = [list(map(expression, x.shape)) for x in results]
    return sum(1 for _ in itertools.takewhile(lambda s: len(set(s)) == 1, zip(*sizes, strict=False)))


def plain_body(module: GraphModule, devices: set[torch.device]) -> GraphModule:
    """The body without copies of what it returns, and on the device of what it is given, whatever that is.

    Args:
        module: not changed.
        devices: of what it is given.

    Raises:
        LoopNotUnderstood: it works on several devices.
    """
    if len(devices) != 1:
        raise LoopNotUnderstood("works on several devices")
    graph = Graph()
    copies: dict[Node, Node] = {}
    results = graph.graph_copy(module.graph, copies)
    graph.output(torch.fx.node.map_arg(results, _before_copies))
    without_marks(graph)
    first = next(iter(graph.nodes))
    with graph.inserting_after(next(n for n in reversed(graph.nodes) if n.op == "placeholder")):
        device = graph.call_function(getattr, (first, "device"))
    for node in graph.nodes:
        given = [x for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, torch.device)]
        if not set(given) <= devices:
            raise LoopNotUnderstood("works on several devices")
        if given:
            own = lambda x: device if isinstance(x, torch.device) else x  # noqa: E731
            node.args, node.kwargs = tree_map(own, node.args), tree_map(own, dict(node.kwargs))
    for node in reversed(graph.nodes):  # and nothing else that nobody reads: it may be a change in place
        if _is_copy(node) and not node.users:
            graph.erase_node(node)
    return GraphModule(module, graph)


def _before_copies(node: Node) -> Node:
    while _is_copy(node) and len(node.args) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_copy(node: Node) -> bool:
    return node.target in ("clone", torch.clone)


def known_loop(body: LoopBody, operands: Sequence[Tensor]) -> str:
    """The name under which the op calls a loop; loops that do the same have the same.

    Args:
        body: of the loop.
        operands: of the op, of any shape and dtype; only those are looked at.
    """
    first = None if body.first is None else content_of(body.first)
    key = repr(
        (content_of(body.module), first, body.carried, body.by_rows, body.rest, body.last, body.shared)
    )
    if key not in _names:
        name = f"loop_{len(_names)}"
        dims = tuple(0 if k < body.by_rows else None for k in range(len(operands)))
        RECURRENCES[name] = Recurrence(
            name,
            body.step,
            dims,
            rows=0,
            like=0,
            sizes=body.sizes,
            state_sizes=body.state_sizes,
            by_row=True,
        )
        _names[key] = name
    return _names[key]


#: Names of loops, by what they do.
_names: dict[str, str] = {}


def refuse_effects_of(body: LoopBody, operands: Sequence[Tensor]) -> None:
    """A body must compute values of what it is given, and nothing else.

    Args:
        body: of the loop.
        operands: of the op, of any shape and dtype; only those are looked at.

    Raises:
        LoopNotUnderstood: it draws random numbers, changes something, or calls parts of itself.
    """
    for module in (body.module, body.first):
        if module is not None:
            _refuse_effects_of(module, body, operands)


def _refuse_effects_of(module: GraphModule, body: LoopBody, operands: Sequence[Tensor]) -> None:
    if any(n.op in ("get_attr", "call_module") for n in module.graph.nodes):
        raise LoopNotUnderstood("holds tensors or graphs of its own")
    if any(n.op == "call_function" and n.is_impure() for n in module.graph.nodes):
        raise LoopNotUnderstood("writes into something, or switches gradients, autocast or another mode")
    try:
        with _disable_current_modes(), FakeTensorMode():
            rows, begin, rest = body.split(_few_of(operands))
            run: Callable[..., Any] = Retrace(module).run
            graph = trace(run, *begin, *(x[0] for x in rows), *rest, pre_dispatch=True)
        refuse_effects(graph)
        refuse_regions(graph.graph.nodes)
        refuse_strides(graph.graph.nodes)
    except NotPureError as error:
        raise LoopNotUnderstood(str(error)) from error
    for node in graph.graph.nodes:
        if node.op == "get_attr" or changes_something(node) or _draws(node):
            raise LoopNotUnderstood(f"{node.target} is more than a function of values")


def _draws(node: Node) -> bool:
    return node.op == "call_function" and is_random(node)


def reached(body: LoopBody, operands: Sequence[Tensor]) -> list[list[bool]]:
    """For each result of a row: which operands have a gradient if this result has one, and no other.

    Args:
        body: of the loop.
        operands: of the op, of any shape and dtype; only those are looked at.
    """
    length = body.carried + 2  # so that what goes from state to state arrives
    with _disable_current_modes(), FakeTensorMode(), torch.enable_grad():
        few = [x.requires_grad_(x.is_floating_point()) for x in _few_of(operands, body.by_rows, length)]
        rows, carried, rest = body.split(few)
        made = []
        for k, row in enumerate(zip(*(x.unbind(0) for x in rows), strict=True)):
            carried, results = body.call(carried, row, rest, k == 0)
            made.append(results)
        return [_reached_from(each, few) for each in zip(*made, strict=True)]


def _reached_from(values: Sequence[Tensor], operands: Sequence[Tensor]) -> list[bool]:
    asked, ends = [x for x in operands if x.requires_grad], [x for x in values if x.requires_grad]
    if not ends:
        return [False] * len(operands)
    ones = [torch.ones_like(x) for x in ends]
    found = torch.autograd.grad(ends, asked, ones, allow_unused=True, retain_graph=True)
    has = {id(x) for x, g in zip(asked, found, strict=True) if g is not None}
    return [id(x) in has for x in operands]


def _few_of(operands: Sequence[Tensor], by_rows: int = 0, rows: int = 2) -> list[Tensor]:
    """Operands of the same kinds, with 2 in place of sizes that are symbols; of the first ones, some rows."""
    sizes = [[2 if isinstance(s, torch.SymInt) else int(s) for s in x.shape] for x in operands]
    sizes = [[rows, *own[1:]] if k < by_rows else own for k, own in enumerate(sizes)]
    return [torch.empty(s, dtype=x.dtype, device=x.device) for s, x in zip(sizes, operands, strict=True)]
