"""Mask rules of the ops that move elements (views, slices, gathers), and of positions (`arange`, `diff`)."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from .elements import (
    Blocks,
    Cases,
    Dims,
    Elements,
    Index,
    MaskNotUnderstood,
    broadcast,
    is_tensor,
    number,
    repeats_no_symbol,
    shape,
    tensor,
)
from .predicates import implies
from .registry import EXACT, aten, mask_rule, own, own_dim, scalar_leaf


def _no_block(node: fx.Node, dims: Dims) -> list:
    raise MaskNotUnderstood(node, "has no block of its own: it is expected to be linear")


# --- Views that add, drop, repeat or reorder dims -------------------------------------------------


def _dropped(node: fx.Node, values: tuple, fill: Any) -> tuple:
    """Entries for the operand's dims, where `node` only adds or drops dims of size 1."""
    before, after = shape(node.args[0]), shape(node)
    if [s for s in before if s != 1] != [s for s in after if s != 1]:
        raise MaskNotUnderstood(node, f"a view from {before} to {after}")
    kept = iter([v for v, s in zip(values, after, strict=True) if s != 1])
    return tuple(fill if s == 1 else next(kept) for s in before)


def _reshaped(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    (block,) = operands.values()
    block = block.squeeze(tuple(d for d, s in enumerate(shape(node.args[0])) if s == 1))
    for dim, size in enumerate(shape(node)):
        block = block.unsqueeze(dim) if size == 1 else block
    return block


@mask_rule(
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
    operands=lambda node, dims: [(node.args[0], _dropped(node, dims, None))],
    build=_reshaped,
)
def _view(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """Dims of size 1 come or go: the element at the other dims."""
    return elements.at(node.args[0], _dropped(node, index, sympy.S.Zero))


def _expanded(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    (block,) = operands.values()
    before = (sympy.S.One,) * (len(dims) - block.dim()) + shape(node.args[0])
    sizes = []
    for dim, interval in enumerate(dims):
        if before[dim] != 1:
            sizes.append(-1)
        elif interval is not None:
            sizes.append(interval[1] - interval[0])
        else:
            sizes.append(blocks.scalar(node.args[1][dim]))
    return block.expand(sizes)


@mask_rule(aten.expand.default, build=_expanded)
def _expand(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element that is repeated."""
    return elements.at(node.args[0], broadcast(node, node.args[0], index))


def _permuted(node: fx.Node, values: tuple) -> tuple:
    ndim = len(shape(node))
    order = list(range(ndim))
    if node.target is aten.permute.default:
        order = [d % ndim for d in node.args[1]]
    else:
        a, b = node.args[1] % ndim, node.args[2] % ndim
        order[a], order[b] = b, a
    source: list[Any] = [None] * ndim
    for dim, origin in enumerate(order):
        source[origin] = values[dim]
    return tuple(source)


@mask_rule(
    *(aten.transpose.int, aten.permute.default),
    operands=lambda node, dims: [(node.args[0], _permuted(node, dims))],
)
def _permute(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element at the dims in their old order."""
    return elements.at(node.args[0], _permuted(node, index))


# --- Views and gathers that pick elements ---------------------------------------------------------


def _start(node: fx.Node) -> sympy.Expr:
    """First position of a slice; raises unless it is known not to be negative and the step is 1."""
    start = own(node, "start")
    start = sympy.S.Zero if start is None else scalar_leaf(node, start)
    if own(node, "step") != 1 or not start.is_nonnegative:
        raise MaskNotUnderstood(node, "a slice with a step or a negative start")
    return start


def _slice_operands(node: fx.Node, dims: Dims) -> list[tuple[fx.Node, Dims]]:
    dim, start = own_dim(node), _start(node)
    if dims[dim] is None or start == 0:
        return [(node.args[0], dims)]
    if not start.is_Integer:
        raise MaskNotUnderstood(node, "a block of a slice with a symbolic start")
    shifted = tuple(bound + int(start) for bound in dims[dim] or ())
    return [(node.args[0], (*dims[:dim], shifted, *dims[dim + 1 :]))]


def _sliced(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    (block,) = operands.values()
    dim = own_dim(node)
    if dims[dim] is not None or shape(node) == shape(node.args[0]):
        return block  # the operand's block was taken at the right place
    return aten.slice.Tensor(block, dim, blocks.scalar(own(node, "start")), blocks.scalar(own(node, "end")))


@mask_rule(aten.slice.Tensor, operands=_slice_operands, build=_sliced)
def _slice(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element so many places further on."""
    dim, start = own_dim(node), _start(node)
    return elements.at(node.args[0], (*index[:dim], index[dim] + start, *index[dim + 1 :]))


def _selected(node: fx.Node, dims: Dims) -> list[tuple[fx.Node, Dims]]:
    dim = own_dim(node)
    return [(node.args[0], (*dims[:dim], None, *dims[dim:]))]


@mask_rule(aten.select.int, operands=_selected)
def _select(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element at a fixed place of one more dim."""
    dim, position = own_dim(node), scalar_leaf(node, node.args[2])
    if not position.is_nonnegative:
        position = position + shape(node.args[0])[dim]
    return elements.at(node.args[0], (*index[:dim], position, *index[dim:]))


def _gathered(node: fx.Node, values: tuple) -> tuple[list[tuple[int, fx.Node, tuple]], list[tuple[int, Any]]]:
    """Entries of `values` by role: (source dim, index tensor, its entries), and (source dim, entry) kept."""
    source, indices = node.args
    ndim = len(shape(source))
    used = [d for d, n in enumerate(indices) if n is not None]
    tensors = [indices[d] for d in used]
    if any(not is_tensor(n) or tensor(n).dtype not in EXACT for n in tensors):
        raise MaskNotUnderstood(node, "indexing with a mask")
    count = max(tensor(n).dim() for n in tensors)
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0  # where the dims of the index tensors come in the result
    joint, others = values[first : first + count], iter((*values[:first], *values[first + count :]))
    sizes = shape(node)[first : first + count]
    by_tensor = []
    for dim, n in zip(used, tensors, strict=True):
        tail = count - len(shape(n))
        if any(s not in (1, o) for s, o in zip(shape(n), sizes[tail:], strict=True)):
            raise MaskNotUnderstood(node, f"cannot align {n.name}")
        by_tensor.append((dim, n, joint[tail:]))
    return by_tensor, [(d, next(others)) for d in range(ndim) if d not in used]


def _gather_operands(node: fx.Node, dims: Dims) -> list[tuple[fx.Node, Dims]]:
    source = node.args[0]
    if not repeats_no_symbol(source):
        raise MaskNotUnderstood(node, "gathers from a value with two sequence dims")
    by_tensor, kept = _gathered(node, dims)
    whole: list[Any] = [None] * len(shape(source))
    for dim, interval in kept:
        whole[dim] = interval
    needed = {n: d for _, n, d in by_tensor}
    if source in needed:
        raise MaskNotUnderstood(node, "a tensor that indexes itself")
    return [(source, tuple(whole)), *needed.items()]


@mask_rule(aten.index.Tensor, operands=_gather_operands)
def _gather(elements: Elements, node: fx.Node, index: Index) -> Boolean | Cases:
    """The element at a place that another tensor says: positions, or a table looked up by positions."""
    by_tensor, kept = _gathered(node, index)
    place: list[Any] = [None] * len(shape(node.args[0]))
    for dim, entry in kept:
        place[dim] = entry
    for dim, n, entries in by_tensor:
        place[dim] = elements.integer(n, entries)
        if not implies(sympy.true, place[dim] >= 0, elements.bounds):
            raise MaskNotUnderstood(node, f"an index that may be negative: {place[dim]}")
    return elements.at(node.args[0], tuple(place))


# --- Positions ------------------------------------------------------------------------------------


@mask_rule(aten.arange.default, aten.arange.start, aten.arange.start_step, operands=_no_block)
def _arange(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The position itself: start + step * index."""
    start, step = own(node, "start", 0), own(node, "step", 1)
    if tensor(node).dtype not in EXACT:
        raise MaskNotUnderstood(node, "positions that are not integers")
    return ((sympy.true, scalar_leaf(node, start) + scalar_leaf(node, step) * index[0]),)


@mask_rule(aten.diff.default, operands=_no_block)
def _diff(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """First differences behind a prepended element, where the first equals all others."""
    source, prepend, dim = node.args[0], own(node, "prepend"), own_dim(node)
    unit_steps = own(node, "n") == 1 and own(node, "append") is None and tensor(node).dtype in EXACT
    if not unit_steps or prepend is None or shape(prepend)[dim] != 1:
        raise MaskNotUnderstood(node, "differences other than of first order with one element prepended")

    def at(position: sympy.Expr) -> Index:
        return (*index[:dim], position, *index[dim + 1 :])

    first = elements.integer(source, at(sympy.S.Zero)) - elements.integer(prepend, at(sympy.S.Zero))
    later = elements.integer(source, at(index[dim])) - elements.integer(source, at(index[dim] - 1))
    if sympy.expand(first - later) != 0:
        raise MaskNotUnderstood(node, "differences that are not all the same expression")
    return ((sympy.true, sympy.expand(first)),)


@mask_rule(aten.cumsum.default, operands=_no_block)
def _cumsum(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A running sum of one constant."""
    dim = own_dim(node)
    position = sympy.Dummy("position", integer=True, nonnegative=True)
    cases = elements.cases(node.args[0], (*index[:dim], position, *index[dim + 1 :]))
    constant = number(cases[0][1])
    if len(cases) != 1 or constant is None or tensor(node).dtype not in EXACT:
        raise MaskNotUnderstood(node, "a running sum of values that vary")
    return ((sympy.true, sympy.Integer(constant) * (index[dim] + 1)),)
