"""autocast: the casts that autocast makes inside ops become ops of the graph.

NOTE [autocast]: above the autograd layer, where graphs are captured, autocast has not acted yet: a product of
float32 operands is recorded with a bfloat16 result. Chunks are run again in backward, where autocast is off,
so the graph has to say itself what is cast. No list of ops is kept here: PyTorch's dispatcher knows which ops
have an autocast kernel, and the recorded dtype of the result says what it did. Each of its policies (lower
precision, float32, widest operand) casts all operands to the dtype of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.facts import CapturedGraph, tensors_of

aten = torch.ops.aten
REGION_OPS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
Casts = dict[tuple[Node, torch.dtype], Node]


def autocast(captured: CapturedGraph) -> CapturedGraph:
    """Make autocast's casts explicit, in place, if the graph was captured under autocast or enters it."""
    graph = captured.module.graph
    regions = [n for n in graph.nodes if n.target in REGION_OPS]
    if not regions and not captured.autocast:
        return captured
    for node in reversed(regions):
        graph.erase_node(node)
    casts: Casts = {}
    for node in list(graph.nodes):
        if _has_autocast_kernel(node) or _is_made_of_products(node):
            _cast_operands(graph, node, casts)
    captured.module.recompile()
    return captured


def _has_autocast_kernel(node: Node) -> bool:
    """False also where a dtype is given: such an op converts its operands itself."""
    if not isinstance(node.target, torch._ops.OpOverload) or not tensors_of(node):
        return False
    if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
        return False
    key = "Autocast" + {"cpu": "CPU", "cuda": "CUDA"}.get(tensors_of(node)[0].device.type, "CPU")
    return torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), key)


def _is_made_of_products(node: Node) -> bool:
    """True for an op that is made of others, whose result has a lower precision than all of its operands.

    `einsum` has no autocast kernel: the products have, of which PyTorch makes it.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or not tensors_of(node):
        return False
    if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
        return False
    name = node.target.name()
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    given = {t.dtype for n in node.all_input_nodes for t in tensors_of(n) if t.is_floating_point()}
    made = tensors_of(node)[0].dtype
    return composite and given == {torch.float32} and made in (torch.float16, torch.bfloat16)


def _cast_operands(graph: Graph, node: Node, casts: Casts) -> None:
    dtype = next((t.dtype for t in tensors_of(node) if t.dtype in CAST_BY_AUTOCAST), None)
    if dtype is None:
        return
    for operand in node.all_input_nodes:
        value: Any = operand.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in CAST_BY_AUTOCAST and value.dtype != dtype:
            node.replace_input_with(operand, _cast(graph, operand, dtype, casts))


def _cast(graph: Graph, operand: Node, dtype: torch.dtype, casts: Casts) -> Node:
    if (operand, dtype) not in casts:
        after = operand
        if operand.op == "placeholder":
            after = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(after):
            cast = graph.call_function(aten.to.dtype, (operand, dtype))
        cast.meta = {k: v for k, v in operand.meta.items() if k in ("stack_trace", "nn_module_stack")}
        value = operand.meta["val"]
        with torch.no_grad(), torch._C._DisableAutocast(), value.fake_mode:
            cast.meta["val"] = value.to(dtype)
        casts[operand, dtype] = cast
    return casts[operand, dtype]
