"""Products in normal form: an einsum of two operands is a matrix product of their dims in another order.

And attention reads repeated keys and values as the heads that they are, of one head size (equal up to
rounding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ...graph.facts import shape_of
from ...graph.op_arguments import arguments, sdpa_arguments
from ..normalize import cast, insert, is_returned, rewrite

aten = torch.ops.aten


@rewrite(aten.einsum.default)
def einsum_as_product(graph: Graph, node: Node) -> Node | None:
    """`einsum("bhid,bhjd->bhij", q, k)` -> `q @ k.transpose(-1, -2)`, and so for any two operands."""
    equation, operands, *path = node.args
    labels = _labels(equation, operands)  # type: ignore[arg-type]
    if labels is None or any(p is not None for p in path) or node.kwargs.get("path") is not None:
        return None
    left, right, result = labels
    shared = [c for c in left if c in right]
    batch = [c for c in result if c in shared]
    inner = [c for c in shared if c not in result]
    rows, columns = ([c for c in own if c not in shared] for own in (left, right))
    if any(c not in result for c in (*rows, *columns)) or any(c not in (*left, *right) for c in result):
        return None  # a sum over one operand, or a dim that nobody has
    if not _sizes_agree(left, right, operands):
        return None  # a dim of size 1 is broadcast
    # in the dtype of the result, which may be that of autocast
    operands = [cast(graph, node, x, node.meta["val"].dtype) for x in operands]  # type: ignore[union-attr]
    first = _matrix(graph, node, operands[0], left, (batch, rows, inner))  # type: ignore[index]
    second = _matrix(graph, node, operands[1], right, (batch, inner, columns))  # type: ignore[index]
    product = insert(graph, node, aten.matmul.default, first, second)
    product = _ungrouped(graph, node, product, len(batch) + 1, columns, right, operands[1])  # type: ignore[index]
    product = _ungrouped(graph, node, product, len(batch), rows, left, operands[0])  # type: ignore[index]
    order = [*batch, *rows, *columns]
    if order == result:
        return product
    return insert(graph, node, aten.permute.default, product, [order.index(c) for c in result])


def _labels(equation: str, operands: Any) -> tuple[list[str], list[str], list[str]] | None:
    """Labels of the dims of two operands and of the result; None for anything else."""
    sides = equation.replace(" ", "").split("->")
    given = sides[0].split(",")
    if len(given) != 2 or len(operands) != 2 or "." in equation:
        return None
    both = given[0] + given[1]
    made = sides[1] if len(sides) == 2 else "".join(sorted(c for c in set(both) if both.count(c) == 1))
    found = [list(given[0]), list(given[1]), list(made)]
    return None if any(len(set(own)) < len(own) for own in found) else tuple(found)  # type: ignore[return-value]


def _sizes_agree(left: list[str], right: list[str], operands: Any) -> bool:
    first, second = (
        dict(zip(own, shape_of(x), strict=True)) for own, x in zip((left, right), operands, strict=True)
    )
    return all(first[c] == second[c] for c in first if c in second)


def _matrix(graph: Graph, before: Node, value: Node, labels: list[str], groups: Any) -> Node:
    """An operand as matrices: batch dims, then one dim for each of the other two groups of labels."""
    order = [c for group in groups for c in group]
    if order != labels:
        value = insert(graph, before, aten.permute.default, value, [labels.index(c) for c in order])
    dim = len(groups[0])
    for group in groups[1:]:
        if len(group) == 0:
            value = insert(graph, before, aten.unsqueeze.default, value, dim)
        elif len(group) > 1:
            value = insert(graph, before, aten.flatten.using_ints, value, dim, dim + len(group) - 1)
        dim += 1
    return value


def _ungrouped(
    graph: Graph, before: Node, product: Node, dim: int, group: list[str], labels: list[str], source: Node
) -> Node:
    """A product whose dim that stands for a group of labels is taken apart again."""
    if len(group) == 1:
        return product
    if not group:
        return insert(graph, before, aten.squeeze.dim, product, dim)
    sizes = []
    for place in (labels.index(c) for c in group):
        size = source.meta["val"].shape[place]
        sizes.append(
            size if isinstance(size, int) else insert(graph, before, aten.sym_size.int, source, place)
        )
    return insert(graph, before, aten.unflatten.int, product, dim, sizes)


# ---- grouped heads


def grouped_source(node: Any) -> tuple[Node, int] | None:
    """`(x, n)` if `node` repeats each head of `x` (dim 1 of 4) n times, whatever way it is written."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.repeat_interleave.self_int:
        call = arguments(node)
        source, count = call["self"], call["repeats"]
        heads = len(shape_of(node)) == 4 and call["dim"] in (1, -3)
        return (source, count) if heads and isinstance(count, int) and count > 1 else None
    if node.target not in (aten.reshape.default, aten.view.default, aten.flatten.using_ints):
        return None
    inner = node.args[0]
    if inner.target is aten.clone.default or inner.target is aten.contiguous.default:
        inner = inner.args[0]
    if inner.target is not aten.expand.default or inner.args[0].target is not aten.unsqueeze.default:
        return None
    source, dim = inner.args[0].args
    if len(shape_of(source)) != 4 or dim not in (2, -3):
        return None
    heads, count = shape_of(source)[1], shape_of(inner)[2]
    before, after = shape_of(source), shape_of(node)
    repeated = (before[0], heads * count, *before[2:])
    return (source, int(count)) if after == repeated and count.is_integer and count > 1 else None


def one_for_each(queries: Any, repeated: Node) -> bool:
    """True if queries have the samples and heads that repeated keys or values have: nothing is broadcast."""
    return isinstance(queries, Node) and shape_of(queries)[:-2] == shape_of(repeated)[:-2]


def _chain(node: Node) -> list[Node]:
    """A value that repeats heads, and what it is made of down to the heads."""
    found = [node]
    while found[-1].args[0] is not grouped_source(node)[0]:  # type: ignore[index]
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


@rewrite(aten.to.dtype, aten._to_copy.default)
def cast_heads(graph: Graph, node: Node) -> Node | None:
    """A cast of repeated heads repeats heads that are cast: under autocast they are seen as repeated too."""
    source, dtype = node.args[0], node.meta["val"].dtype
    transposed = source.target is aten.transpose.int and len(source.users) == 1
    repeated = source.args[0] if transposed else source
    found = grouped_source(repeated)
    if found is None or source.meta["val"].device != node.meta["val"].device or len(repeated.users) > 1:
        return None
    if any(is_returned(n) for n in (node, source, *_chain(repeated))):
        return None  # their gradients are those of all heads
    heads, count = found
    made = insert(graph, node, aten.repeat_interleave.self_int, cast(graph, node, heads, dtype), count, 1)
    return insert(graph, node, aten.transpose.int, made, *source.args[1:]) if transposed else made


@rewrite(aten.scaled_dot_product_attention.default)
def attention_heads(graph: Graph, node: Node) -> Node | None:
    """Attention over heads that are stored once for their group, with keys and values of one head size."""
    grouped = _grouped(graph, node)
    return _of_one_size(graph, grouped or node) or grouped


def _grouped(graph: Graph, node: Node) -> Node | None:
    """Hand the kernel the heads as they are: repeated keys and values are never stored."""
    call = sdpa_arguments(node)
    key, value = grouped_source(call["key"]), grouped_source(call["value"])
    if call["enable_gqa"] or key is None or value is None or key[1] != value[1]:
        return None
    if not one_for_each(call["query"], call["key"]) or not one_for_each(call["query"], call["value"]):
        return None
    if any(is_returned(n) for given in (call["key"], call["value"]) for n in _chain(given)):
        return None  # their gradients are those of all heads
    return insert(
        graph, node, node.target, call["query"], key[0], value[0], call["attn_mask"], call["dropout_p"],
        call["is_causal"], scale=call["scale"], enable_gqa=True,
    )  # fmt: skip


def _of_one_size(graph: Graph, node: Node) -> Node | None:
    """Keys and values of two head sizes: the smaller ones get zeros.

    NOTE [head sizes of latent attention]: PyTorch's flash attention wants one head size. With two, a CPU
    would make scores of all columns, and a GPU use a slower kernel. Zeros behind the channels of queries and
    keys change no score; those behind the channels of values make channels of the result that are cut off.
    The state grows by them: keys of 192 channels and values of 128 take 192 + 192.
    """
    call = sdpa_arguments(node)
    given = [call[name] for name in ("query", "key", "value")]
    of_keys, of_values = (shape_of(n)[-1] for n in given[1:])
    numbers = of_keys.is_Integer and of_values.is_Integer
    if not numbers or of_keys == of_values or len(shape_of(given[0])) != 4 or call["dropout_p"] != 0.0:
        return None
    mask = call["attn_mask"]
    if mask is not None and mask.meta["val"].dtype != torch.bool:
        return None  # a row of equal huge numbers has another gradient in flash attention than in products
    size = max(int(of_keys), int(of_values))
    if not _flash_takes(given, size):
        return None
    query, key, value = (_wider(graph, node, n, size) for n in given)
    scale = int(of_keys) ** -0.5 if call["scale"] is None else call["scale"]
    made = insert(
        graph, node, node.target, query, key, value, call["attn_mask"], 0.0, call["is_causal"],
        scale=scale, enable_gqa=call["enable_gqa"],
    )  # fmt: skip
    return insert(graph, node, aten.slice.Tensor, made, 3, 0, int(of_values))


def _flash_takes(given: list[Node], size: int) -> bool:
    """Whether flash attention of the device is for operands of these dtypes, with heads of a size.

    On a CPU products in half precision are computed in float32, which flash attention does not do.
    """
    dtypes = {n.meta["val"].dtype for n in given}
    device = given[0].meta["val"].device.type
    if device == "cuda":
        return len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} and size <= 256
    return device == "cpu" and len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}


def _wider(graph: Graph, before: Node, heads: Node, size: int) -> Node:
    """Heads (B, H, n, D) with zeros behind their channels, (B, H, n, size)."""
    more = size - int(shape_of(heads)[-1])
    return heads if more == 0 else insert(graph, before, aten.constant_pad_nd.default, heads, [0, more])
