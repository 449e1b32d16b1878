"""autocast: the casts that autocast makes inside ops become ops of the graph.

NOTE [autocast]: above the autograd layer, where graphs are captured, autocast has not acted yet: a product of
float32 operands is recorded with a bfloat16 result. Chunks are run again in backward, where autocast is off,
so the graph has to say itself what is cast. No list of ops is needed for that: an op whose result, without
autocast, would have another dtype than the recorded one gets its operands cast to the recorded one. That is
what each of autocast's policies (lower precision, float32, widest operand) comes to.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from .capture import CapturedGraph
from .ir import tensors_of

aten = torch.ops.aten
REGION_OPS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(captured: CapturedGraph) -> CapturedGraph:
    """Make autocast's casts explicit, in place, if the graph was captured under autocast or enters it."""
    graph = captured.module.graph
    regions = [n for n in graph.nodes if n.target in REGION_OPS]
    if not regions and not captured.autocast:
        return captured
    for node in reversed(regions):
        graph.erase_node(node)
    casts: dict[tuple[Node, torch.dtype], Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and tensors_of(node):
            _as_recorded(graph, node, casts)
    captured.module.recompile()
    return captured


def _as_recorded(graph: Graph, node: Node, casts: dict[tuple[Node, torch.dtype], Node]) -> None:
    recorded = [t.dtype for t in tensors_of(node)]
    if _dtypes(node, None) == recorded:
        return
    wanted = next((d for d in recorded if d in CAST_BY_AUTOCAST), None)
    if wanted is None or _dtypes(node, wanted) != recorded:
        raise TypeError(f"what autocast does to {node.target} is not understood ({node.name})")
    for operand in node.all_input_nodes:
        if any(_is_cast(t, wanted) for t in tensors_of(operand)):
            node.replace_input_with(operand, _cast(graph, operand, wanted, casts))


def _is_cast(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return value.dtype in CAST_BY_AUTOCAST and value.dtype != dtype


def _dtypes(node: Node, cast_to: torch.dtype | None) -> list[torch.dtype] | None:
    """Dtypes of the op's results without autocast, its operands cast first if asked; None if it refuses."""

    def operand(source: Node) -> Any:
        value = source.meta["val"]
        if cast_to is not None and isinstance(value, torch.Tensor) and _is_cast(value, cast_to):
            return value.to(cast_to)
        return value

    with torch.no_grad(), torch._C._DisableAutocast(), _mode_of(node):
        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError):
            return None
    return [t.dtype for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def _mode_of(node: Node) -> Any:
    values = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), contextlib.nullcontext())


def _cast(
    graph: Graph, operand: Node, dtype: torch.dtype, casts: dict[tuple[Node, torch.dtype], Node]
) -> Node:
    if (operand, dtype) not in casts:
        after = operand
        if operand.op == "placeholder":
            after = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(after):
            cast = graph.call_function(aten.to.dtype, (operand, dtype))
        cast.meta = {k: v for k, v in operand.meta.items() if k in ("stack_trace", "nn_module_stack")}
        with torch.no_grad(), torch._C._DisableAutocast(), _mode_of(operand):
            cast.meta["val"] = operand.meta["val"].to(dtype)
        casts[operand, dtype] = cast
    return casts[operand, dtype]
