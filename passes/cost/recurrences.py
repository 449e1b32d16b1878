"""What a recurrence holds while it runs, besides what it is given and returns, and what it computes.

Nobody can read that from its op, so it is run on tensors without memory. Such a function works on blocks of
rows, as many as its author found good, and fills the last one up: what is alive at once grows with the square
of the rows within a block, and with the number of blocks beyond. It grows evenly with the samples, from the
second one on: of one sample much lies in memory as an op wants it, and is not copied.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..graph.facts import expression, tensors_of
from ..graph.ops.recurrence import KERNELS, RECURRENCE_KEPT, RECURRENCE_KEPT_VJP, RECURRENCES
from ..graph.symbols import in_numbers
from .live_bytes import LiveBytes, bytes_in
from .work import CountedWork, Work

#: Rows of a block that are tried, the fewest first.
BLOCKS = (16, 32, 64, 128, 256, 512)
#: By what share of the bytes of a block a second and a third one may differ from each other.
EVEN = 0.02


def inner_bytes(node: Node) -> sympy.Expr:
    """Bytes that an op of a recurrence holds at most, over its operands and results; 0 for all others."""
    return _in_sizes(node, _bytes_of) if node.target in KERNELS else sympy.S.Zero


def kept_bytes(node: Node) -> sympy.Expr:
    """Bytes that the record of a step holds until it is differentiated, see NOTE [a recorded step]."""
    return _in_sizes(node, lambda n, rows, number, several: _held(_without_memory(n, rows, number, several)))


def _in_sizes(node: Node, bytes_of: Callable[[Node, sympy.Expr, int, int], int]) -> sympy.Expr:
    """Bytes in the sizes of the graph, from those of a number of rows of one sample and of two."""
    rows, samples = _sizes(node)

    def found(several: int) -> sympy.Expr:
        own = functools.cache(lambda number: bytes_of(node, rows, number, several))
        return _by_blocks(rows, own, _blocks(node))

    if samples == 1:
        return found(1)
    return sympy.Piecewise((found(1), sympy.Eq(samples, 1)), (found(2) * samples / 2, True))


def kept_and_inner_bytes_at(step: Node, vjp: Node, size: Callable[[sympy.Expr], int]) -> tuple[int, int]:
    """Bytes that the record of a step would hold, and those that its VJP holds without one.

    Args:
        step, vjp: as they are, without a record.
        size: the value of an expression in the sizes.
    """
    rows, samples = _sizes(step)
    number, several = max(1, size(rows)), size(samples)

    def kept(number: int) -> int:
        args = _without_memory(vjp, rows, number, 1)
        return _held((*args[:5], args[7]))

    alone = functools.partial(_bytes_of, vjp, rows, several=1)
    return _of_rows(step, kept, number) * several, _of_rows(step, alone, number) * several


def _of_rows(node: Node, bytes_of: Callable[[int], int], number: int) -> int:
    """Bytes for a number of rows; few are run where a recurrence goes from row to row."""
    block = _blocks(node)[0]
    if not RECURRENCES[node.args[0]].by_row or number <= 2 * block:  # type: ignore[index]
        return bytes_of(number)
    one, two = bytes_of(block), bytes_of(2 * block)
    return one + (two - one) * (number - block) // block


def inner_work(node: Node) -> Work:
    """What an op of a recurrence computes and moves, to which its rows add evenly."""
    rows, samples = _sizes(node)
    block = _blocks(node)[-1]
    few, more = (_work_of(node, rows, k * block) for k in (1, 2))
    return (more + few.map(operator.neg)).map(lambda part: sympy.Rational(part, block) * rows * samples)


def _blocks(node: Node) -> tuple[int, ...]:
    """Numbers of rows that may be a block of a recurrence."""
    return (BLOCKS[0] // 2,) if RECURRENCES[node.args[0]].by_row else BLOCKS  # type: ignore[index]


def _work_of(node: Node, rows: sympy.Expr, number: int) -> Work:
    """The same with a number for the rows, and one sample."""
    args = _with_record(node, _without_memory(node, rows, number, 1))
    with CountedWork() as counted:
        KERNELS[node.target](*args)
    return counted.work


def _with_record(node: Node, args: Any) -> Any:
    """The arguments of an op; where it reads the record of a step, with one."""
    if node.target is not RECURRENCE_KEPT_VJP:
        return args
    return (*args[:8], KERNELS[RECURRENCE_KEPT](*args[:5], args[7])[2])


def _sizes(node: Node) -> tuple[sympy.Expr, sympy.Expr]:
    """The rows of a recurrence, and its samples, whatever is one of them."""
    shape = _shape(node)
    rows = shape.pop(RECURRENCES[node.args[0]].rows)  # type: ignore[index]
    return rows, sympy.Mul(*(s for s in shape if not s.is_Integer))


def _shape(node: Node) -> list[sympy.Expr]:
    """That of the operand which has the rows where the result has them."""
    known = RECURRENCES[node.args[0]]  # type: ignore[index]
    return [expression(s) for s in tensors_of(node.args[1][known.like])[0].shape]  # type: ignore[index]


def _by_blocks(
    rows: sympy.Expr, bytes_of: Callable[[int], int], blocks: Sequence[int] = BLOCKS
) -> sympy.Expr:
    """Bytes as an expression in the rows, from those of a few numbers of rows."""
    block = next((b for b in blocks if _grows_evenly(b, bytes_of)), blocks[-1])
    first, more = bytes_of(block), bytes_of(3 * block) - bytes_of(2 * block)
    half = 2 * bytes_of(block * 3 // 2) - bytes_of(block) - bytes_of(2 * block)
    begun = rows / block if abs(half) <= EVEN * first else sympy.ceiling(rows / block)  # none is filled up
    beyond = sympy.ceiling(first + more * (begun - 1))
    return sympy.Piecewise(*_within_block(rows, block, bytes_of), (beyond, True))


def _within_block(
    rows: sympy.Expr, block: int, bytes_of: Callable[[int], int]
) -> Iterator[tuple[sympy.Expr, Any]]:
    """Bytes of up to a block of rows: what is alive at the peak may be another value from a half of it on."""
    for end in (block // 4, block // 2, block):
        tried = [(n, bytes_of(n)) for n in (end // 2, end * 3 // 4, end)]
        yield sympy.ceiling(sympy.interpolate(tried, rows)), rows <= end


def _grows_evenly(block: int, bytes_of: Callable[[int], int]) -> bool:
    """True if each block of so many rows holds as much more as the one before."""
    one, two, three = (bytes_of(k * block) for k in (1, 2, 3))
    return two - one > 0 and abs((three - two) - (two - one)) <= EVEN * one


def _bytes_of(node: Node, rows: sympy.Expr, number: int, several: int) -> int:
    """The same with a number for the rows, and of the samples."""
    args = _without_memory(node, rows, number, several)
    with LiveBytes(x for x in tree_leaves(args) if isinstance(x, Tensor)) as meter:
        args = _with_record(node, args)
        before = meter.peak = meter.live
        made: Any = KERNELS[node.target](*args)
        kept = meter.live - bytes_in(made) if node.target is RECURRENCE_KEPT else before
    return max(0, meter.peak - kept - bytes_in(made))


def _held(args: Any) -> int:
    """What the record of a step holds, over its operands and its results."""
    with LiveBytes(x for x in tree_leaves(args) if isinstance(x, Tensor)) as meter:
        made = KERNELS[RECURRENCE_KEPT](*args)
        return meter.live - bytes_in(made)


def _without_memory(node: Node, rows: sympy.Expr, number: int, several: int) -> Any:
    """What the op is given for so many rows of so many samples."""

    samples = [s for s in _shape(node) if not s.is_Integer and s != rows]
    known: dict[Any, Any] = {}  # the symbols; of several dims of samples the last have one
    counts = dict(zip(samples, (several, *(1 for _ in samples[1:])), strict=False))
    for size_of, count in counts.items():
        if len(size_of.free_symbols) == 1 and size_of.is_polynomial():
            (symbol,) = size_of.free_symbols
            known[symbol] = next(iter(sympy.solve(size_of - count, symbol)), sympy.S.One)

    def size(given: sympy.Expr) -> int:
        return number if given == rows else counts[given] if given in counts else in_numbers(given, known)

    numbers = {**known, **({rows: number} if rows.is_Symbol else {})}

    def alike(value: Node) -> Tensor:
        """It lies in memory as the value does, which decides what an op copies."""
        given = tensors_of(value)[0]
        shape = [size(expression(s)) for s in given.shape]
        strides = [expression(s) for s in given.stride()]
        if all(set(stride.free_symbols) <= numbers.keys() for stride in strides):
            laid = [in_numbers(stride, numbers) for stride in strides]
            return torch.empty_strided(shape, laid, dtype=given.dtype, device="meta")
        return torch.empty(shape, dtype=given.dtype, device="meta")

    return torch.fx.node.map_arg(node.args, alike)
