"""accumulate: gradients of parameters are added to their sums where they are made, without a temporary.

A product of a weight is added by the op that makes it, rows of a table that were looked up by index, and
products of groups of rows (experts) some columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.facts import sum_dtype

aten = torch.ops.aten
GROUPED = aten._grouped_mm.default
PARTS = 4  # of a gradient of groups: each more makes more kernels, and spares less
ALIGNED = 8  # columns of a part are multiples of these: kernels want 16 bytes, so eight numbers of two


def accumulate(graph: Graph, count: int, eager: bool) -> None:
    """Add each gradient to its sum where it is made, in place.

    Args:
        graph: returns gradients at its end, and takes their sums as its last inputs.
        count: of the sums.
        eager: the program runs on PyTorch's own kernels.
    """
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    values = list(output.args[0])
    buffers = [n for n in graph.nodes if n.op == "placeholder"][-count:]
    kept, gradients = values[:-count], values[-count:]
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is None:
            continue
        single = isinstance(gradient, Node) and gradients.count(gradient) == 1 and len(gradient.users) == 1
        added = single and (
            _as_product(graph, buffer, gradient, eager)
            or _as_rows(graph, buffer, gradient)
            or _as_groups(graph, buffer, gradient)
        )
        if not added:
            with graph.inserting_after(gradient):
                graph.call_function(aten.add_.Tensor, (buffer, gradient))
    output.args = (kept,)


def _as_product(graph: Graph, buffer: Node, gradient: Node, eager: bool) -> bool:
    """`buffer += a @ b` in one op, also where the gradient is a product seen through transposes or a cast."""
    total = buffer.meta["val"]
    product, transposed = _seen_through(gradient, lambda n: n.target is aten.t.default)
    if product.target is not aten.mm.default or len(product.users) != 1:
        return False
    own, cast = product.meta["val"], product.meta["val"].dtype != total.dtype
    on_cpu, fused = total.device.type == "cpu", eager and adds_in_float32(total, own.dtype)
    widens = sum_dtype(own.dtype) == total.dtype
    if own.device != total.device or (cast and not (widens and (on_cpu or fused))):
        return False  # NOTE [products in float32]
    with graph.inserting_before(product):
        target = graph.call_function(aten.t.default, (buffer,)) if transposed else buffer
        if cast and fused:
            graph.call_function(aten.addmm.dtype_out, (target, *product.args, total.dtype), {"out": target})
            return True
        factors = [_in_dtype(graph, n, total.dtype) if cast else n for n in product.args]
        graph.call_function(aten.addmm_.default, (target, *factors))
    return True


def _seen_through(gradient: Node, turns: Callable[[Node], bool]) -> tuple[Node, bool]:
    """What a gradient is before a cast and transposes that nobody else reads, and whether it is transposed.

    Args:
        turns: says of an op whether it is such a transpose.
    """
    product, transposed = gradient, False
    if product.target is aten._to_copy.default and len(product.args[0].users) == 1:  # type: ignore[union-attr]
        product = product.args[0]  # type: ignore[assignment]  # the cast of autocast
    while turns(product) and len(product.users) == 1:
        product, transposed = product.args[0], not transposed  # type: ignore[assignment]
    return product, transposed


def _as_rows(graph: Graph, buffer: Node, gradient: Node) -> bool:
    """Rows of a gradient are added to those rows of a table that were looked up: no chunk makes a table."""
    if gradient.target is not aten.embedding_dense_backward.default or gradient.kwargs:
        return False
    rows, places, _, padding, by_count = gradient.args
    if by_count or not isinstance(padding, int):
        return False
    dtype, width = buffer.meta["val"].dtype, buffer.meta["val"].shape[1:]
    with graph.inserting_before(gradient):
        if padding >= 0:  # a row that is never learned
            hidden = _made(graph, aten.eq.Scalar, places, padding)
            hidden = _made(graph, aten.unsqueeze.default, hidden, -1)
            rows = _made(graph, aten.masked_fill.Scalar, rows, hidden, 0)
        if rows.meta["val"].dtype != dtype:
            rows = _in_dtype(graph, rows, dtype)
        rows = _made(graph, aten.reshape.default, rows, [-1, *width])
        places = _made(graph, aten.reshape.default, places, [-1])
        graph.call_function(aten.index_add_.default, (buffer, 0, places, rows))
    return True


def _as_groups(graph: Graph, buffer: Node, gradient: Node) -> bool:
    """The gradient of a product of groups of rows, (groups, m, n), is made and added a part of n at a time.

    NOTE [gradients of experts]: such a gradient is as large as all experts together, whatever the chunk. No
    op adds it to a sum, so all of it would be alive beside the sum, for each chunk.
    """
    product, transposed = _seen_through(gradient, _turns_the_last)
    if product.target is not GROUPED or len(product.users) != 1 or product.meta["val"].dim() != 3:
        return False
    left, right, *more = product.args
    plain = right.meta["val"].dim() == 2 and not product.kwargs and not any(n is not None for n in more[1:])
    if not plain or product.meta["val"].device != buffer.meta["val"].device:
        return False
    columns = right.meta["val"].shape[1]
    if not isinstance(columns, int) or columns % (PARTS * ALIGNED):
        return False
    step = columns // PARTS
    with graph.inserting_before(gradient):
        total = _made(graph, aten.transpose.int, buffer, -2, -1) if transposed else buffer
        for start in range(0, columns, step):
            part = _made(graph, aten.slice.Tensor, right, 1, start, start + step)
            part = _made(graph, GROUPED, left, part, *more)
            into = _made(graph, aten.slice.Tensor, total, 2, start, start + step)
            graph.call_function(aten.add_.Tensor, (into, part))
    return True


def _turns_the_last(node: Node) -> bool:
    """True for a transpose of the last two of three dims."""
    if node.target is not aten.transpose.int:
        return False
    return node.meta["val"].dim() == 3 and {d % 3 for d in node.args[1:]} == {1, 2}  # type: ignore[operator]


def _made(graph: Graph, op: Any, *args: Any) -> Node:
    """A new op, with what it makes of fake tensors."""
    node = graph.call_function(op, args)
    given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with next(v for v in given if isinstance(v, Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = op(*given)
    return node


def adds_in_float32(buffer: Tensor, dtype: torch.dtype) -> bool:
    """True where PyTorch adds a product of half precision to float32 numbers in one kernel: on NVIDIA's GPUs.

    Args:
        buffer: the numbers, of any shape.
        dtype: of the product's factors.
    """
    nvidia = buffer.device.type == "cuda" and torch.version.hip is None
    return nvidia and dtype != buffer.dtype == sum_dtype(dtype)


def _in_dtype(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """NOTE [products in float32]: a product that is rounded to half precision and then added to a float32 sum
    loses digits, and needs a temporary as large as the weight, which is written and read once more.

    On NVIDIA's GPUs one op does both (`addmm` with an `out_dtype`). On a CPU there is no such kernel, so the
    factors, which have the rows of one chunk, are cast. On other devices products in float32 are many times
    slower, so there it is a product in half precision, and then a sum.
    """
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    value = node.meta["val"]
    with value.fake_mode:
        cast.meta["val"] = value.to(dtype)
    return cast
