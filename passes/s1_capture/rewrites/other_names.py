"""Ops that are another op by another name (`multiply`, `concat`, `special_expit`) are that op.

PyTorch says so: such an op has no kernel of its own, and what it is composed of is one call. Rows that are
taken at 0, 0, 1, 1, 2, 2, ... are rows that are repeated.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ...graph.facts import expression, shape_of
from ...graph.op_arguments import arguments, bound
from ...graph.tracing import trace
from ...rules.registry import rule_of
from ..normalize import AHEAD, REWRITES, insert, rewrite

aten = torch.ops.aten
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


@rewrite(aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist)
def moved_dims(graph: Graph, node: Node) -> Node:
    """`movedim(x, 1, 0)` is a permutation of the dims."""
    source, *places = node.args
    sizes = [k + 1 for k in range(len(shape_of(source)))]
    numbered = torch.empty(sizes, dtype=torch.uint8, device="meta")  # type: ignore[arg-type]
    order = [int(k) - 1 for k in numbered.movedim(*places).shape]  # type: ignore[arg-type]
    return insert(graph, node, aten.permute.default, source, order)


RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default)


@rewrite(aten.index.Tensor)
def repeated_rows(graph: Graph, node: Node) -> Node | None:
    """`x[arange(n).unsqueeze(1).expand(n, k).reshape(-1)]`, of n rows: each row k times."""
    value, indices = node.args[0], node.args[1]
    if not isinstance(value, Node) or not isinstance(indices, list | tuple) or len(indices) != 1:
        return None
    found = _repeats_of(indices[0])
    if found is None or found[0] != shape_of(value)[0]:
        return None
    return insert(graph, node, aten.repeat_interleave.self_int, value, found[1], 0)


def _repeats_of(index: Any) -> tuple[Any, int] | None:
    """Of an index with the values 0 to n - 1, in this order and each k times, n and k; None of any other."""
    if not isinstance(index, Node) or not index.args or len(shape_of(index)) != 1:
        return None
    if index.target is aten.repeat_interleave.self_int:
        call = arguments(index)
        found, each = _counted(call["self"]), call["repeats"]
        alone = found is not None and len(shape_of(call["self"])) == 1 and isinstance(each, int)
        return (found[0], each) if alone and found is not None else None
    found = _counted(index.args[0]) if index.target in RESHAPES else None
    if found is None:
        return None
    (end, dim), shape = found, shape_of(index.args[0])
    each = sympy.Mul(*shape[dim + 1 :])
    return (end, int(each)) if each.is_Integer and all(s == 1 for s in shape[:dim]) else None


def _counted(node: Any) -> tuple[Any, int] | None:
    """The size and the dim of a value that counts from zero along that dim, alike along all others."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in (aten.arange.default, aten.arange.start):
        call = arguments(node)
        end = call["end"].meta["val"] if isinstance(call["end"], Node) else call["end"]
        counts = call.get("start", 0) == 0 and node.meta["val"].dtype == torch.int64
        return (expression(end), 0) if counts else None
    found = _counted(node.args[0]) if node.args else None
    if found is None:
        return None
    (end, dim), old, new = found, shape_of(node.args[0]), shape_of(node)
    if node.target in RESHAPES:
        alone = [s for s in old if s != 1] == [s for s in new if s != 1] == [end]
        return (end, new.index(end)) if alone else None
    if node.target in (aten.expand.default, aten.repeat.default):
        dim += len(new) - len(old)  # new dims are in front
        return (end, dim) if new[dim] == end else None
    return None
