"""Mask rules of choices (`where`, `masked_fill`), of bands (`triu`, `tril`) and of constants."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.logic.boolalg import And, Not
from torch import fx

from .elements import (
    Blocks,
    Cases,
    Dims,
    Elements,
    Index,
    Leaf,
    MaskNotUnderstood,
    broadcast,
    is_tensor,
    leaf_of,
    number,
    tensor,
    to_boolean,
)
from .registry import EXACT, aten, mask_rule, one_element, own, scalar_leaf


def _choice(elements: Elements, node: fx.Node, index: Index, condition: fx.Node, yes: Any, no: Any) -> Cases:
    """Cases of `yes where condition else no`, in the dtype of `node`."""

    def cases(arg: Any) -> Cases:
        if is_tensor(arg):
            return elements.cases(arg, broadcast(node, arg, index))
        return ((sympy.true, scalar_leaf(node, arg)),)

    holds = to_boolean(elements.cases(condition, broadcast(node, condition, index)))
    chosen = [(And(holds, c), leaf) for c, leaf in cases(yes)]
    chosen += [(And(Not(holds), c), leaf) for c, leaf in cases(no)]
    return tuple((c, _stored(node, leaf)) for c, leaf in chosen)


def _stored(node: fx.Node, leaf: Leaf) -> Leaf:
    """`leaf` as an element of `node`."""
    dtype = tensor(node).dtype
    value = number(leaf)
    if value is not None:
        return leaf_of(one_element(value, dtype).item())
    if (dtype in EXACT and leaf.is_integer) or (dtype.is_floating_point and not leaf.is_integer):
        return leaf
    raise MaskNotUnderstood(node, f"an unknown value stored as {dtype}")


@mask_rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """One of two elements, by a condition."""
    return _choice(elements, node, index, *node.args)


@mask_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The element or a constant, by a condition."""
    source, condition, value = node.args
    return _choice(elements, node, index, condition, value, source)


def _band_block(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    (block,) = operands.values()
    row, col = ((0 if d is None else d[0]) for d in dims[-2:])
    rows = torch.arange(row, row + block.shape[-2], device=block.device)
    cols = torch.arange(col, col + block.shape[-1], device=block.device)
    distance = cols - rows.unsqueeze(-1)
    diagonal = blocks.scalar(own(node, "diagonal"))
    kept = distance >= diagonal if node.target is aten.triu.default else distance <= diagonal
    return torch.where(kept, block, torch.zeros((), dtype=block.dtype, device=block.device))


@mask_rule(aten.triu.default, aten.tril.default, build=_band_block)
def _band(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """The element on one side of a diagonal, zero on the other."""
    diagonal = scalar_leaf(node, own(node, "diagonal"))
    distance = index[-1] - index[-2]
    kept = distance >= diagonal if node.target is aten.triu.default else distance <= diagonal
    cases = elements.cases(node.args[0], index)
    zero = _stored(node, sympy.S.Zero)
    return (*((And(kept, c), leaf) for c, leaf in cases), (Not(kept), zero))


def block_sizes(blocks: Blocks, node: fx.Node, dims: Dims, sizes: Any) -> list[Any]:
    """Sizes of a block: of its intervals, else what the argument `sizes` of the op says."""
    return [blocks.scalar(s) if d is None else d[1] - d[0] for s, d in zip(sizes, dims, strict=True)]


def _fill(node: fx.Node) -> Any:
    """The value that a full-like op writes."""
    name = node.target._opname
    return 1 if "ones" in name else 0 if "zeros" in name else own(node, "fill_value")


def _filled(blocks: Blocks, node: fx.Node, dims: Dims, operands: dict) -> torch.Tensor:
    sizes = block_sizes(blocks, node, dims, own(node, "size"))
    value, like = blocks.scalar(_fill(node)), tensor(node)
    return torch.full(sizes, value, dtype=like.dtype, device=like.device)


def _filled_element(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A constant."""
    return ((sympy.true, _stored(node, scalar_leaf(node, _fill(node)))),)


mask_rule(
    *(aten.full.default, aten.ones.default, aten.zeros.default),
    *(aten.new_full.default, aten.new_ones.default, aten.new_zeros.default),
    operands=lambda node, dims: [],
    build=_filled,
)(_filled_element)
mask_rule(aten.full_like.default, aten.ones_like.default, aten.zeros_like.default)(_filled_element)


@mask_rule(aten.scalar_tensor.default)
def _scalar(elements: Elements, node: fx.Node, index: Index) -> Cases:
    """A number."""
    return ((sympy.true, _stored(node, scalar_leaf(node, node.args[0]))),)
