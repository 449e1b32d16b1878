"""normalize: no dead code, no-ops removed, losses by rows first (`split_losses`).

Every rewrite keeps the value. Grad-mode regions become `detach`.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from ..graph.facts import CapturedGraph, expression, shape_of
from ..graph.op_arguments import arguments
from ..graph.purity import is_impure
from ..graph.refusals import NotPureError
from ..rules.pointwise import pointwise_ops
from ..rules.row_orders import SORTS
from .kept_gradients import KeptGradients

aten = torch.ops.aten
Rewrite = Callable[[Graph, Node], "Node | None"]
REWRITES: dict[Any, list[Rewrite]] = {}
AHEAD: list[Callable[[Graph], None]] = []  # what is done to a graph before its nodes are rewritten
ELEMENTWISE = set(pointwise_ops()) - {aten.dropout.default, aten.native_dropout.default}


class RewriteError(Exception):
    """A rewrite made something else of a value: a bug of the compiler."""


def rewrite(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite: it returns the node to use instead, or None to leave the node alone."""

    def register(function: Rewrite) -> Rewrite:
        for op in ops:
            REWRITES.setdefault(op, []).append(function)
        return function

    return register


def normalize(captured: CapturedGraph) -> CapturedGraph:
    """Bring a captured graph to normal form, in place.

    Raises:
        NotPureError: the gradients of some input would be None where eager has zeros.
    """
    graph = captured.module.graph
    _grad_mode_regions(graph)
    kept = KeptGradients(captured)
    for function in AHEAD:
        function(graph)
    for node in list(graph.nodes):
        for rewriting in REWRITES.get(node.target, []):
            replacement = rewriting(graph, node)
            if replacement is not None and replacement is not node:
                _check_replacement(rewriting, node, replacement)
                if kept.lost(node, replacement):
                    if rewriting is not copied:
                        continue
                    replacement = _covered(graph, node, replacement)
                if rewriting not in SAME_OBJECT:
                    _refuse_shared_name(node, replacement)
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
                break
    kept.check()
    graph.eliminate_dead_code(is_impure_node=is_impure)
    captured.module.recompile()
    return captured


def _check_replacement(function: Rewrite, node: Node, replacement: Node) -> None:
    """A replacement is the same value, so it has the same shape and dtype: else the rewrite is wrong.

    Raises:
        RewriteError: it has another one.
    """
    was, now = (n.meta.get("val") for n in (node, replacement))
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return
    same = len(was.shape) == len(now.shape) and all(map(_same_size, was.shape, now.shape))
    if was.dtype != now.dtype or not same:
        made = f"{now.dtype} of shape {list(now.shape)} of {was.dtype} of shape {list(was.shape)}"
        raise RewriteError(f"{function.__name__} made {made} ({node.name}, {node.target})")


def _same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True if two sizes are equal, by their expressions or else in the example that was captured."""
    found = [s.node.hint if isinstance(s, torch.SymInt) else s for s in (a, b)]
    return expression(a) == expression(b) or None in found or found[0] == found[1]


def is_beginning(call: dict[str, Any], last: int) -> bool:
    """True for a slice, given by its arguments, that takes neighbouring entries from the first on.

    Args:
        call: of `aten.slice.Tensor`.
        last: the dim of which it has to take them, the last one.
    """
    along = call["dim"] % (last + 1) == last
    return along and call["start"] in (None, 0) and call["step"] in (None, 1)


def _refuse_shared_name(node: Node, replacement: Node) -> None:
    """Raise if a value that is returned would get another gradient, that of all made of `replacement`.

    See NOTE [gradients of hidden states] in `s2_prove.inner_outputs`.

    Raises:
        NotPureError: it would.
    """
    dtype = node.meta["val"].dtype
    known = replacement in node.all_input_nodes and (dtype.is_floating_point or dtype.is_complex)
    if known and is_returned(node) and any(u is not node for u in replacement.users):
        raise NotPureError("a view is returned of a value of which others are made", node)


def is_returned(node: Node) -> bool:
    """True for a value that the graph returns."""
    return any(user.op == "output" for user in node.users)


def insert(graph: Graph, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node before `before`, with its fake value and the source line of `before`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in before.meta.items() if k in ("stack_trace", "nn_module_stack")}
    values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    known = torch.utils._pytree.tree_leaves((values, before.meta.get("val")))
    mode = next(v.fake_mode for v in known if hasattr(v, "fake_mode"))
    with mode, enable_python_dispatcher(), torch.no_grad():  # else composite ops would make sizes constants
        node.meta["val"] = target(*values[0], **values[1])
    return node


def cast(graph: Graph, before: Node, value: Node, dtype: torch.dtype) -> Node:
    """A value in a dtype: itself, if it has that."""
    return value if value.meta["val"].dtype == dtype else insert(graph, before, aten.to.dtype, value, dtype)


def _grad_mode_regions(graph: Graph) -> None:
    """Values made while gradients were off are constants: `detach` what leaves such a region."""
    enabled = True
    inside: set[Node] = set()
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
            graph.erase_node(node)
        elif not enabled and isinstance(node.meta.get("val"), torch.Tensor) and node.op == "call_function":
            inside.add(node)
    for node in inside:
        outside = [u for u in node.users if u not in inside]
        value = node.meta["val"]
        if outside and (value.is_floating_point() or value.is_complex()):
            detached = insert(graph, node.next, aten.detach.default, node)
            for user in outside:
                user.replace_input_with(node, detached)


# ---- no-ops


@rewrite(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default)
def same_dtype(graph: Graph, node: Node) -> Node | None:
    """A cast to the dtype that a value has is the value."""
    source, value = node.args[0].meta["val"], node.meta["val"]
    copies = arguments(node).get("copy") or node.target is aten._to_copy.default
    same = source.dtype == value.dtype and source.device == value.device
    return node.args[0] if same and not copies else None


@rewrite(aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
def alias(graph: Graph, node: Node) -> Node | None:
    """Another name of a value is the value."""
    return node.args[0]


def _fused() -> list[Any]:
    """The op that functionalization makes of `addcmul_`, where this version of torch has it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.inductor_prims")  # registers it
    packet = getattr(torch.ops.prims, "fma", None)
    return [] if packet is None else [packet.default]


@rewrite(*_fused())
def multiplied_and_added(graph: Graph, node: Node) -> Node:
    """`fma(a, b, c)` is a * b + c, with one rounding less. (It cannot be traced on fake tensors again.)"""
    first, second, third = node.args
    return insert(graph, node, aten.add.Tensor, insert(graph, node, aten.mul.Tensor, first, second), third)


def _covered(graph: Graph, node: Node, source: Node) -> Node:
    """What was copied into a value, where the old value has a gradient of zeros."""
    value = node.meta["val"]
    yes = insert(graph, node, aten.full.default, [], True, dtype=torch.bool, device=value.device)
    return insert(graph, node, aten.where.self, yes, source, node.args[0])


@rewrite(aten.copy.default)
def copied(graph: Graph, node: Node) -> Node:
    """What was copied into a value, in its dtype and shape, is the value. (`copy` has no derivative.)"""
    target, source = node.args[:2]
    old, new = target.meta["val"], source.meta["val"]
    if old.dtype != new.dtype or old.device != new.device:
        kwargs = {"dtype": old.dtype, "device": old.device}
        source = insert(graph, node, aten._to_copy.default, source, **kwargs)
    if shape_of(source) != shape_of(target):
        source = insert(graph, node, aten.expand_as.default, source, target)
    return source


@rewrite(aten.dropout.default, aten.alpha_dropout.default)
def no_dropout(graph: Graph, node: Node) -> Node | None:
    """Dropout that drops nothing is the value."""
    _, p, train = node.args
    return node.args[0] if p == 0.0 or not train else None


@rewrite(aten.narrow.default)
def narrowed(graph: Graph, node: Node) -> Node | None:
    """Entries from a place on are a slice."""
    source, dim, start, length = node.args
    if not isinstance(start, int) or start < 0 or (start > 0 and not isinstance(length, int)):
        return None
    end = length if start == 0 else start + length  # type: ignore[operator]
    return insert(graph, node, aten.slice.Tensor, source, dim, start, end)


@rewrite(aten.slice.Tensor)
def full_slice(graph: Graph, node: Node) -> Node | None:
    """A slice that takes as many entries as there are, one after the other, takes everything."""
    source, _, _, _, step = (*node.args, None, None, None, None)[:5]
    return source if step in (None, 1) and shape_of(node) == shape_of(source) else None


@rewrite(aten.slice_scatter.default)
def full_slice_scatter(graph: Graph, node: Node) -> Node | None:
    """A replacement of everything is what replaces it."""
    base, part = node.args[:2]
    return part if shape_of(part) == shape_of(base) else None


@rewrite(aten._native_batch_norm_legit_functional.default)
def batch_norm_with_statistics(graph: Graph, node: Node) -> None:
    """The result as the op that has a gradient; the new statistics as what they are."""
    x, weight, bias, *statistics, training, momentum, eps = node.args
    result = insert(
        graph, node, aten.batch_norm.default, x, weight, bias, None, None, training, momentum, eps, False
    )
    rows = insert(graph, node, aten.detach.default, x)
    dims = [d for d in range(len(shape_of(x))) if d != 1]
    made = {0: lambda: result}
    for place, old, op in zip((3, 4), statistics, (aten.mean.dim, aten.var.dim), strict=True):
        made[place] = partial(_moved, graph, node, old, (op, rows, dims), momentum)
    for user in list(node.users):
        if user.args[1] in made:
            user.replace_all_uses_with(made[user.args[1]]())
            graph.erase_node(user)


def _moved(graph: Graph, before: Node, old: Node, new: tuple, momentum: float) -> Node:
    """A running statistic moved towards that of a batch."""
    op, *given = new
    batch = insert(graph, before, op, *given)
    if old.meta["val"].dtype != batch.meta["val"].dtype:
        batch = insert(graph, before, aten.to.dtype, batch, old.meta["val"].dtype)
    kept = insert(graph, before, aten.mul.Tensor, old, 1 - momentum)
    return insert(
        graph, before, aten.add.Tensor, kept, insert(graph, before, aten.mul.Tensor, batch, momentum)
    )


@rewrite(aten.index_put.default)
def inverse_order(graph: Graph, node: Node) -> Node | None:
    """0, 1, 2, ... put at the places that a sort gives: where each entry has gone, the order of the order."""
    base, (order, *others), values, *accumulate = node.args
    if others or any(accumulate) or node.kwargs.get("accumulate") or not _is_order(order):
        return None
    call = arguments(values) if isinstance(values, Node) and values.target in RANGES else {}
    counted = bool(call) and (call.get("start", 0), call.get("step", 1)) == (0, 1)
    whole = all(n.meta["val"].dtype == torch.int64 for n in (base, values, node))
    if not counted or not whole or not shape_of(base) == shape_of(values) == shape_of(order):
        return None
    return insert(graph, node, aten.argsort.default, order)


RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def _is_order(node: Any) -> bool:
    """True for a vector that names each place of another one once."""
    if not isinstance(node, Node) or len(shape_of(node)) != 1:
        return False
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return True
    return node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in SORTS  # type: ignore[union-attr]


@rewrite(aten.cat.default)
def cat_with_nothing(graph: Graph, node: Node) -> Node | None:
    """What has no entries (an empty cache) leaves no trace: of one dim, or along the dim that is joined."""
    dim = arguments(node)["dim"]
    parts = [p for p in node.args[0] if shape_of(p) != (0,) and shape_of(p)[dim] != 0]
    if any(p.meta["val"].dtype != node.meta["val"].dtype for p in parts):
        return None  # what is left out may have had a say in the dtype
    if len(parts) == len(node.args[0]) or not parts:
        return None
    return parts[0] if len(parts) == 1 else insert(graph, node, node.target, parts, *node.args[1:])


@rewrite(aten.view.default, aten.reshape.default, aten.expand.default, aten.flatten.using_ints)
def same_shape(graph: Graph, node: Node) -> Node | None:
    """A view of the shape that a value has is the value."""
    return node.args[0] if shape_of(node) == shape_of(node.args[0]) else None


@rewrite(aten._unsafe_view.default)
def reshaped(graph: Graph, node: Node) -> Node | None:
    """`_unsafe_view(clone(x))`: so functionalization writes a `reshape` that has to copy."""
    source, shape = node.args
    contiguous = {"memory_format": torch.contiguous_format}
    if source.target is not aten.clone.default or source.kwargs != contiguous:
        return None
    if any(is_returned(n) for n in (node, source)):
        return None  # what is returned has memory of its own
    return insert(graph, node, aten.reshape.default, source.args[0], shape)


@rewrite(aten.contiguous.default)
def already_contiguous(graph: Graph, node: Node) -> Node | None:
    """`contiguous` of a value that is contiguous is the value."""
    return None if node.kwargs else node if not _is_contiguous(node.args[0]) else node.args[0]


def _is_contiguous(node: Node) -> bool:
    expected: sympy.Expr = sympy.S.One
    value = node.meta["val"]
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != expected:
            return False
        expected = expected * expression(size)
    return True


# Eager returns the operand itself for these, and so the gradient of all that is made of it.
SAME_OBJECT = {same_dtype, no_dropout, already_contiguous}
