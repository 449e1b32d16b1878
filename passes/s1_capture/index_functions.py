"""Functions of one element of the scores, as ops on all elements at once.

FlexAttention calls its functions with numbers: a score, and where it stands (batch entry, head, row, column).
Here each op of such a function is called once, on tensors whose four dims are those of the scores and which
broadcast: rows (1, 1, T, 1), columns (1, 1, 1, T), a document (B, 1, T, 1). So a mask is a comparison of
positions, as in any other model, and the passes read it as one.

What is called so must mean the same on numbers and on tensors that broadcast. It does for ops on single
elements, by PyTorch's own tag, and for taking an element of a captured tensor. Everything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from ..graph.autograd_functions import Retrace
from ..graph.determinism import is_deterministic
from ..graph.facts import expression
from ..graph.functionalization import changes_something, unwrapped
from ..graph.purity import is_impure
from ..graph.refusals import NotPureError
from ..graph.tracing import trace
from ..rules.pointwise import pointwise_ops

aten = torch.ops.aten
# Ops on single elements that have no tag.
COPIES = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
ELEMENTWISE = {*pointwise_ops(), *COPIES}
SUMS = (aten.add.Tensor, aten.sub.Tensor)
# Ops that take only shape and dtype of an operand, and the number that they give; None: their last argument.
FILLS = {
    aten.new_ones.default: 1, aten.new_zeros.default: 0, aten.new_full.default: None,
    aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.full_like.default: None,
}  # fmt: skip


class FunctionNotUnderstood(Exception):
    """A function of one element does something that is not known to mean the same on all of them."""


class Indices(NamedTuple):
    """Where elements of scores (B, H, T, S) are, int64.

    Attributes:
        batch: (B, 1, 1, 1).
        head: (1, H, 1, 1).
        row: (1, 1, T, 1).
        column: (1, 1, 1, S).
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class Spread:
    """A number of each element of the scores.

    Attributes:
        tensor: of four dims, which broadcasts to the scores.
    """

    tensor: Tensor


@dataclass(frozen=True)
class Taken:
    """Part of a captured tensor, another one for each element of the scores.

    Attributes:
        source: the captured tensor.
        places: for each of its dims the place that was taken, a number or a tensor as in `Spread`; None for
            a dim of which nothing was taken yet.
    """

    source: Tensor
    places: tuple[int | Tensor | None, ...]


def all_indices(scores: tuple[Any, ...], device: torch.device) -> Indices:
    """The indices of scores.

    Args:
        scores: their sizes (B, H, T, S).
        device: where the indices will be.
    """
    sizes = [(*(1,) * d, size, *(1,) * (3 - d)) for d, size in enumerate(scores)]
    return Indices(*(torch.arange(n, device=device).view(s) for n, s in zip(scores, sizes, strict=True)))


class IndexFunction:
    """A function of one element, as the ops that PyTorch makes of it.

    Args:
        function: what Dynamo captured; it takes a score unless `dtype` is None, four indices, and `captured`.
        dtype: of the scores; None for a function of the indices alone.
        device: of the scores.
        captured: what the function reads besides, tensors and sizes.

    Raises:
        FunctionNotUnderstood: it does something that numbers alone do not show.
    """

    def __init__(
        self,
        function: GraphModule,
        dtype: torch.dtype | None,
        device: torch.device,
        captured: tuple[Any, ...],
    ) -> None:
        self.captured = captured
        _refuse_modes(function)
        given = pytree.tree_map(unwrapped, captured)
        with disable_functional_mode(), disable_proxy_modes_tracing(), TransformGetItemToIndex():
            numbers = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
            score = [] if dtype is None else [torch.zeros((), dtype=dtype, device=device)]
            try:
                self.graph = trace(lambda *inputs: Retrace(function).run(*inputs), *score, *numbers, *given)
            except NotPureError:
                raise
            except Exception as error:
                reason = str(error).strip().split("\n", 1)[0]
                raise FunctionNotUnderstood(f"cannot be called with numbers ({reason})") from error
        self.graph.graph.eliminate_dead_code(is_impure_node=is_impure)
        self.result = self.graph.graph.output_node().args[0]
        self.placeholders = self.graph.graph.find_nodes(op="placeholder")

    @property
    def returns_score(self) -> bool:
        """True if the function returns its first operand as it is."""
        return self.result is self.placeholders[0]

    @property
    def returns_one(self) -> bool:
        """True if the function returns the number one, or True, wherever it is asked."""
        return isinstance(self.result, Node) and self.result.target is aten.new_ones.default

    def over(self, *given: Tensor) -> Tensor:
        """The value at all elements, of a shape that broadcasts to the scores, in the dtype of the function.

        Args:
            given: what stands for the score, if the function takes one, and `Indices`.

        Raises:
            FunctionNotUnderstood: an op is not known to mean the same on all elements.
        """
        inputs = [*map(Spread, given), *self.captured]
        known: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        indices = Indices(*given[-4:])
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                value = _constant(node)
                known[node] = torch.scalar_tensor(value.item(), dtype=value.dtype, device=value.device)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
                known[node] = _called(node, args, kwargs, indices)
        result = known[self.result] if isinstance(self.result, Node) else None
        return _spread(result, indices)


def _refuse_modes(function: GraphModule) -> None:
    """A function may not switch modes, or call graphs of its own: its ops do not show what that does."""
    for node in function.graph.nodes:
        switches = getattr(node.target, "__module__", None) in ("torch._C", "torch.amp.autocast_mode")
        region = isinstance(node.target, torch._ops.HigherOrderOperator)
        if node.op == "call_function" and (region or (switches and not node.all_input_nodes)):
            raise FunctionNotUnderstood(f"calls {node.target}")


def _constant(node: Node) -> Tensor:
    """A number that a function holds, without dims, made where it is needed."""
    value = getattr(node.graph.owning_module, str(node.target))
    known = getattr(value, "constant", None)  # what a fake tensor stands for
    value = value if known is None else known
    if type(value) is not Tensor or value.dim():
        raise FunctionNotUnderstood("holds a tensor of its own")
    return value


def _number(node: Any) -> int | None:
    """The whole number that a node always is; None if it is none."""
    while isinstance(node, Node) and node.target in COPIES:
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = _constant(node)
    return int(value) if value.dtype in (torch.int32, torch.int64) else None


def _called(node: Node, args: Any, kwargs: Any, indices: Indices) -> Any:
    """What a node makes of what stands for its operands."""
    op: Any = node.target
    leaves = pytree.tree_leaves((args, kwargs))
    if isinstance(op, torch._ops.OpOverload):
        if not is_deterministic(op) or changes_something(node):
            raise FunctionNotUnderstood(f"calls {op}")
    elif any(isinstance(v, (Tensor, Spread, Taken)) for v in leaves):
        raise FunctionNotUnderstood(f"calls {op}")
    if not any(isinstance(v, (Spread, Taken)) for v in leaves):
        return op(*args, **kwargs)
    if op is aten.index.Tensor:
        numbers: Any = map(_number, node.args[1])  # type: ignore[arg-type]
        places = [p if n is None else n for p, n in zip(args[1], numbers, strict=True)]
        return _indexed(args[0], places, indices)
    if op is aten.select.int and isinstance(args[0], Taken):
        return _selected(*args)
    if op in FILLS:
        return _filled(node, FILLS[op] if FILLS[op] is not None else args[-1])
    if op in SUMS and _adds_nothing(node, args[0]):
        return args[0]  # positions stay positions
    if op in ELEMENTWISE or torch.Tag.pointwise in op.tags:
        return _elementwise(node, args, kwargs, indices)
    raise FunctionNotUnderstood(f"calls {op}")


def _adds_nothing(node: Node, value: Any) -> bool:
    """True for a sum with the number 0 that has the dtype of a value."""
    number = node.args[1]
    return (
        isinstance(value, Spread)
        and type(number) is int
        and number == 0
        and node.meta["val"].dtype == value.tensor.dtype
    )


def _filled(node: Node, number: Any) -> Tensor:
    """A number that is the same for all elements, in the dtype of a node."""
    value = node.meta["val"]
    if value.dim() or not isinstance(number, (bool, int, float)):
        raise FunctionNotUnderstood(f"calls {node.target}")
    return torch.full((), number, dtype=value.dtype, device=value.device)


def _elementwise(node: Node, args: Any, kwargs: Any, indices: Indices) -> Spread:
    """An op on single elements, on all of them.

    Which dtype an op computes in depends on which operands have dims: here all have, as before none had. Only
    a number of the dtype that all others have may stay one.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    operands = {id(v): v if isinstance(v, Tensor) else _spread(v, indices) for v in leaves if _is_value(v)}
    alike = len({v.dtype for v in operands.values()}) == 1

    def operand(value: Any) -> Any:
        if not _is_value(value):
            return value
        found = operands[id(value)]
        if isinstance(value, Tensor) and value.dim():
            raise FunctionNotUnderstood(f"calls {node.target} on a tensor with dims")
        return found if found.dim() or alike else found.view(1, 1, 1, 1)

    args, kwargs = pytree.tree_map(operand, (args, kwargs), is_leaf=_is_value)
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    expected = node.meta["val"]
    if expected.dim() or expected.dtype != result.dtype:
        raise FunctionNotUnderstood(f"calls {node.target} in another dtype")
    return Spread(result)


def _is_value(value: Any) -> bool:
    return isinstance(value, (Tensor, Spread, Taken))


def _spread(value: Any, indices: Indices) -> Tensor:
    """A number of each element, as a tensor of four dims or of none."""
    if isinstance(value, Spread):
        return value.tensor
    if isinstance(value, Taken):
        return _gathered(value, indices)
    if isinstance(value, Tensor) and not value.dim():
        return value
    raise FunctionNotUnderstood("makes more than a number of an element")


# ---- elements of captured tensors


def _indexed(source: Any, places: list[Any], indices: Indices) -> Taken:
    """`source[places]`, of a captured tensor or of a part of it."""
    if isinstance(source, Tensor):
        source = Taken(source, (None,) * source.dim())
    if not isinstance(source, Taken):
        raise FunctionNotUnderstood("indexes what it has computed")
    left = iter([*places, *(None,) * len(source.places)])
    found = [next(left) if p is None else p for p in source.places]
    return Taken(source.source, tuple(p if isinstance(p, int) else _place(p, indices) for p in found))


def _place(value: Any, indices: Indices) -> Tensor | None:
    """A place along a dim, as a tensor of four dims."""
    if value is None or (isinstance(value, Tensor) and value.dim() == 4 and value.dtype == torch.int64):
        return value
    place = _spread(value, indices)
    if place.dtype not in (torch.int32, torch.int64):
        raise FunctionNotUnderstood(f"indexes with a {place.dtype}")
    return place if place.dim() else place.view(1, 1, 1, 1)


def _selected(source: Taken, dim: int, place: Any) -> Taken:
    """`source.select(dim, place)`: a number as the place along one of the dims that are left."""
    open_dims = [d for d, p in enumerate(source.places) if p is None]
    if not isinstance(place, int):
        raise FunctionNotUnderstood("selects a place that is a size")
    places = list(source.places)
    places[open_dims[dim]] = place
    return Taken(source.source, tuple(places))


def _gathered(taken: Taken, indices: Indices) -> Tensor:
    """The elements of a captured tensor at the places, each a number: a view where they are all in order.

    `bias[head, row]` is then `bias` with dims of size 1, and not a gather: rows stay rows.
    """
    source, places = taken.source, list(taken.places)
    for dim in reversed(range(len(places))):
        if isinstance(places[dim], int):
            source = source.select(dim, places.pop(dim))  # type: ignore[arg-type]
    if any(p is None for p in places):
        raise FunctionNotUnderstood("makes more than a number of an element")
    in_order = [_axis(p, size, indices) for p, size in zip(places, source.shape, strict=True)]  # type: ignore[arg-type]
    if None in in_order or len(set(in_order)) < len(in_order):
        return aten.index.Tensor(source, places) if places else source
    order = sorted(range(len(places)), key=in_order.__getitem__)  # type: ignore[arg-type]
    source = source.permute(order) if order != sorted(order) else source
    for axis in range(4):
        source = source if axis in in_order else source.unsqueeze(axis)
    return source


def _axis(place: Tensor, size: Any, indices: Indices) -> int | None:
    """Which of the four indices a place is, if these go through all of a dim of this size."""
    found = next((k for k, index in enumerate(indices) if index is place), None)
    return (
        found if found is not None and expression(indices[found].shape[found]) == expression(size) else None
    )
