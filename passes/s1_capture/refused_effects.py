"""What a captured graph must not do: a step in chunks computes values, in memory and an order of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..graph.refusals import MutationError, NotPureError

# Assertions about dtypes, devices and sizes, which fake tensors have answered.
METADATA = {
    "aten::_assert_tensor_metadata", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size",
}  # fmt: skip
# Python functions that return nothing: they switch gradients and autocast, which the trace follows, tell what
# sizes may be, or note which parts of PyTorch are used.
HARMLESS = {
    *(torch._C._set_grad_enabled, torch.amp.autocast_mode._exit_autocast),
    *(torch._check, torch._check_is_size, torch._assert),
    torch._C._log_api_usage_once,
}


def refuse_effects(module: GraphModule) -> None:
    """A graph must do nothing but compute values: what nobody reads would not be run.

    Args:
        module: a graph of Dynamo's, with those of its regions, or one of PyTorch's own ops.

    Raises:
        NotPureError: an op of it that nobody reads may have an effect (an assertion, a log, a setting).
    """
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    for node in (n for graph in graphs for n in graph.nodes):
        takes_tensors = any(map(_is_tensor, node.all_input_nodes))
        effect = _may_have_effect(node) if takes_tensors else _is_called_for_its_effect(node)
        if not node.users and effect:
            raise NotPureError(f"{node.target} may have an effect beside what it returns", node)


def _may_have_effect(node: Node) -> bool:
    """True for an op that returns nothing, and for one of another package."""
    op = node.target
    op = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or op._schema.name in METADATA:
        return False
    return not op._schema.returns or op.namespace not in ("aten", "prims", "streambp_fx")


def _is_called_for_its_effect(node: Node) -> bool:
    """True for a Python function that is given no tensor and returns nothing: it sets a mode, or the like."""
    op, ops = node.target, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
    function = node.op == "call_function" and not isinstance(op, ops) and op not in HARMLESS
    of_transforms = str(getattr(op, "__module__", "")).startswith("torch._functorch.")  # `refuse_transforms`
    return function and not of_transforms and node.meta.get("val", node.meta.get("example_value")) is None


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), Tensor)


def refuse_transforms(module: GraphModule) -> None:
    """A graph must not transform functions within itself (`torch.func`, `torch.vmap`).

    Each transform is a level of functorch's own, which a trace does not see through: what is made within
    would become a constant of the graph. A failure in the middle would leave the level behind, for the whole
    process.

    Raises:
        NotPureError: it does.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "").endswith("_increment_nesting"):
            raise NotPureError("functions are transformed within the forward (torch.func, torch.vmap)", node)


def refuse_regions(nodes: Iterable[Node]) -> None:
    """A captured graph must not hold graphs of its own, which an op calls as it likes (`torch.cond`).

    Raises:
        NotPureError: it does.
    """
    for node in nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotPureError(f"{node.target} calls parts of the graph by itself", node)


def refuse_strides(nodes: Iterable[Node]) -> None:
    """A graph must not say where in the memory of a value something lies (`as_strided`).

    What such an op gives is no function of values: the passes may lay a value out in another way than eager.

    Raises:
        MutationError: an op takes a place in memory.
    """
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(a.name == "storage_offset" for a in schema.arguments):
            raise MutationError(
                f"{node.target} reads memory by strides, which is no function of values", node
            )
