"""FlexAttention as the ops that it stands for: scores, a mask read from its mask function, a softmax.

PyTorch captures `flex_attention` as one op with two functions of its own, which change a score and say which
scores count. Here the functions are called on all elements at once (`index_functions`). What comes out is
`scaled_dot_product_attention` with a mask of rows and columns, or, if a function changes the scores, products
with a softmax between them, as PyTorch computes it without a kernel. The other passes know nothing of it.

See docs/decisions/0033-flex-attention-as-ordinary-ops.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.fx import Graph, GraphModule, Node

from ..graph.facts import expression
from ..graph.refusals import NotPureError
from .block_tables import NO_BLOCKS
from .index_functions import FunctionNotUnderstood, IndexFunction, Indices, all_indices

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


def replaced_attention(graph: Graph, node: Node) -> list[Node]:
    """Replace a call of the op by one of `attention` below, and return the nodes of its block tables."""
    call = inspect.signature(type(FLEX).__call__).bind(FLEX, *node.args, **node.kwargs).arguments
    *tables, row_block, column_block, mask = call["block_mask"]
    has_blocks = (row_block, column_block) != (NO_BLOCKS, NO_BLOCKS)
    natural = call["kernel_options"].get("BACKEND") == "FLASH"
    options = {"has_blocks": has_blocks, "log_base": math.e if natural else 2.0}
    functions = (call["score_mod"], mask)
    captured = (call.get("score_mod_other_buffers", ()), call.get("mask_mod_other_buffers", ()))
    with graph.inserting_before(node):
        args = (call["query"], call["key"], call["value"], functions, captured, call["scale"])
        new = graph.call_function(attention, args, options)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return [t for t in tables if isinstance(t, Node)]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    functions: tuple[GraphModule, GraphModule],
    captured: tuple[tuple[Any, ...], tuple[Any, ...]],
    scale: float,
    *,
    has_blocks: bool,
    log_base: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `flex_attention` computes, as ordinary ops.

    Shapes: query (B, H, T, D); key (B or 1, H or fewer, S, D); value (B or 1, as key, S, Dv).

    Args:
        query, key, value: of one floating-point dtype, or under autocast.
        functions: that of scores, and the mask function, of one element each.
        captured: what either reads besides, tensors and sizes.
        scale: of the products.
        has_blocks: false if the op was given no block mask.
        log_base: in which the second and the third result are.

    Returns:
        output (B, H, T, Dv) in the dtype of the query; log-sum-exp and largest score of each row, (B, H, T),
        in float32 or that of float64 operands. The largest has no gradient.

    Raises:
        NotPureError: it is not known what the functions do.
    """
    try:
        with _without_autocast(query.device.type) as dtype:
            query, key, value = (_cast(x, dtype) for x in (query, key, value))
            if not query.dtype == key.dtype == value.dtype:
                raise FunctionNotUnderstood("is given operands of several dtypes")
            key, value = (_of_batch(x, query) for x in (key, value))
            return _attention(query, key, value, functions, captured, scale, has_blocks, log_base)
    except FunctionNotUnderstood as error:
        raise NotPureError(f"flex_attention: {error}") from error


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    functions: tuple[GraphModule, GraphModule],
    captured: tuple[tuple[Any, ...], tuple[Any, ...]],
    scale: float,
    has_blocks: bool,
    log_base: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same without autocast, of operands of one dtype and batch."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    change = IndexFunction(functions[0], exact, query.device, captured[0])
    hide = IndexFunction(functions[1], None, query.device, captured[1])
    indices = all_indices((*query.shape[:3], key.shape[2]), query.device)
    mask = _mask(hide, indices, has_blocks)
    groups = query.shape[1] // key.shape[1]
    repeated = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    all_keys, all_values = repeated
    scores = query.to(exact) @ all_keys.to(exact).transpose(-2, -1) * scale
    if change.returns_score:
        out = aten.scaled_dot_product_attention.default(
            query, key, value, mask, 0.0, False, scale=scale, enable_gqa=groups > 1
        )
    else:
        changed = change.over(scores, *indices)
        alike = list(map(expression, changed.shape)) == list(map(expression, scores.shape))
        scores = changed if alike else changed.expand(scores.shape)
    if not scores.is_floating_point():
        raise FunctionNotUnderstood("makes scores that are no floating-point numbers")
    if mask is not None:
        scores = aten.where.ScalarOther(mask, scores, -math.inf)
    if not change.returns_score:
        out = aten._safe_softmax.default(scores, -1).to(query.dtype) @ all_values
    unit = math.log(log_base)
    return out, scores.logsumexp(-1) / unit, scores.detach().amax(-1) / unit


def _mask(function: IndexFunction, indices: Indices, has_blocks: bool) -> Tensor | None:
    """Where a row attends to a column, bool, (B or 1, H or 1, T or 1, S or 1); None: everywhere."""
    if function.returns_one and not has_blocks:
        return None
    mask = function.over(*indices)
    if not mask.dim():
        raise FunctionNotUnderstood(
            "has a mask function that is the same everywhere: its blocks are the mask"
        )
    if mask.dtype != torch.bool:
        raise FunctionNotUnderstood(f"has a mask function that returns {mask.dtype}")
    return mask


def _of_batch(value: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each sample of the query: those of one sample serve all."""
    if expression(value.shape[0]) == expression(query.shape[0]):
        return value
    return value.expand(query.shape[0], -1, -1, -1)


@contextlib.contextmanager
def _without_autocast(device: str) -> Iterator[torch.dtype | None]:
    """Within: autocast is off. Gives the dtype that it would cast operands of the op to, None if none."""
    key = AUTOCAST.get(device)
    casts = key is not None and torch.is_autocast_enabled(device) and key in FLEX.py_kernels
    keys = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, AUTOCAST.values()))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield torch.get_autocast_dtype(device) if casts else None


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None or value.dtype == torch.float64 else value.to(dtype)
