"""Ops that are another op by another name (`multiply`, `concat`, `special_expit`) are that op.

PyTorch says so: such an op has no kernel of its own, and what it is composed of is one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..graph.op_arguments import bound
from ..graph.tracing import trace
from ..rules.registry import rule_of
from .normalize import AHEAD, REWRITES, insert

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@AHEAD.append
def under_one_name(graph: Graph) -> None:
    """Replace each op that has no rule, and is one call of another op, by that call."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not _may_be_composed(node.target):
            continue
        call = _one_call(node)
        if call is None:
            continue
        given = dict(zip(call.graph.find_nodes(op="placeholder"), _operands(node), strict=True))
        args, kwargs = torch.fx.node.map_arg((call.args, call.kwargs), given.__getitem__)
        made = insert(graph, node, call.target, *args, **kwargs)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _may_be_composed(target: Any) -> bool:
    plain = isinstance(target, OpOverload) and not target._schema.is_mutable
    return (
        plain
        and target not in REWRITES
        and rule_of(target) is None
        and target.has_kernel_for_dispatch_key(COMPOSITE)
    )


def _operands(node: Node) -> list[Node]:
    return [v for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, Node)]


def _one_call(node: Node) -> Node | None:
    """The only call that an op is composed of, in a graph of the op's operands; None if it is not one."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Node)]

    def composed(*values: Any) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target.decompose(*args, **kwargs)

    values = [leaves[k].meta["val"] for k in places]
    if not values or not all(isinstance(v, Tensor) for v in values):
        return None
    try:
        with FakeTensorMode(), torch.no_grad():  # of its own: nothing becomes true of the graph's sizes
            traced = trace(composed, *map(_example, values))
    except Exception:
        return None  # it is not understood, and stays what it is: an op without a rule
    calls = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
    returned = traced.graph.output_node().args[0]
    alone = len(calls) == 1 and calls[0].op == "call_function" and calls[0] is returned
    known = alone and (rule_of(calls[0].target) is not None or calls[0].target in REWRITES)
    return calls[0] if known and _has_arguments_of(node, calls[0]) else None


def _example(value: Tensor) -> Tensor:
    """A fake tensor of the shape that a value has in the call that was captured."""
    sizes = [(s.node.hint or 5) if isinstance(s, torch.SymInt) else s for s in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device)


def _has_arguments_of(node: Node, call: Node) -> bool:
    """True if a call has no number that the op was not given: none that was made of sizes."""
    own = pytree.tree_leaves(bound(node.target, node.args, node.kwargs))
    given = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if not isinstance(v, Node)]
    return all(any(type(v) is type(o) and v == o for o in own if not isinstance(o, Node)) for v in given)
