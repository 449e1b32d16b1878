"""Values that are the same everywhere, into which others are written: made like a value of their shape.

`zeros(batch * length, width)` says nothing of rows, and would be made for all of them and kept.
`zeros_like(x)` is made by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.facts import shape_of, tensors_of
from ..graph.op_arguments import arguments
from .normalize import insert, is_returned, rewrite

aten = torch.ops.aten
FILLS: dict[Any, float | None] = {
    aten.zeros.default: 0.0, aten.ones.default: 1.0, aten.full.default: None, aten.empty.memory_format: 0.0,
    aten.new_zeros.default: 0.0, aten.new_ones.default: 1.0, aten.new_full.default: None,
    aten.new_empty.default: 0.0,
}  # fmt: skip


@rewrite(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    aten.index_put.default, aten.index_add.default, aten.index_copy.default, aten.select_scatter.default,
    aten.slice_scatter.default,
)  # fmt: skip
def base_like_another(graph: Graph, node: Node) -> Node | None:
    """What is written into is made like a value that has its shape."""
    base: Any = node.args[0]
    if base.target not in FILLS or not any(s.free_symbols for s in shape_of(base)) or is_returned(base):
        return None
    alike = _alike(node, base)
    number = arguments(base)["fill_value"] if FILLS[base.target] is None else FILLS[base.target]
    value = base.meta["val"]
    if alike is None or isinstance(number, Node):
        return None
    made = insert(graph, node, aten.full_like.default, alike, number, dtype=value.dtype, device=value.device)
    node.replace_input_with(base, made)
    return None


def _alike(node: Node, base: Node) -> Node | None:
    """The last value before a node that is computed, is no fill, and has the shape of `base`."""
    earlier = node.prev
    while earlier.op != "root":
        known = earlier.op == "call_function" and isinstance(earlier.meta.get("val"), torch.Tensor)
        if known and earlier.target not in FILLS and shape_of(earlier) == shape_of(base):
            return earlier if earlier is not base and tensors_of(earlier) else None
        earlier = earlier.prev
    return None
