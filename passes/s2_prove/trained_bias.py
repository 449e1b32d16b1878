"""trained_bias: a bias of attention that is trained is made by each attention that reads it.

NOTE [trained biases]: what positions and parameters alone make of rows and columns (a table that is looked up
by distance, slopes times distances, a small network of them) is as large as the scores that it is added to,
and often all layers read the one that the first has made. Nothing so large is stored. Each reader makes it
anew, and a chunk no more than its own rows and columns of it: little work beside the scores. The gradients
that the readers give to the parameters are summed, as those of any parameter with several readers.

PyTorch's attention runs its unfused kernel where its mask has a gradient. Here such an attention is written
as the ops of that kernel, so that the rules for scores say how far its rows read.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.facts import CapturedGraph, operands, shape_degree, shape_of, tensors_of
from ..graph.op_arguments import sdpa_arguments
from ..graph.purity import is_impure, is_random
from ..s1_capture.normalize import cast, insert, is_returned
from .gradient_edges import GradientEdges

aten = torch.ops.aten


class _Made(enum.Enum):
    """Of what a value is made."""

    DATA = enum.auto()  # of no parameter
    WEIGHTS = enum.auto()  # of parameters, and of data without the sequence
    BIAS = enum.auto()  # of rows and columns: of weights and data
    ROWS = enum.auto()  # of anything else


def trained_bias(captured: CapturedGraph) -> CapturedGraph:
    """Have each reader of a trained bias make it, in place."""
    graph = captured.module.graph
    if captured.sequence is None:
        return captured
    made = _origins(captured)
    changed = _with_trained_mask(captured, made)
    if changed:
        for node in changed:
            _write_out(graph, node)
        made = _origins(captured)
    biases = [n for n, origin in made.items() if origin is _Made.BIAS]
    for bias in biases:
        for user in list(bias.users):
            if made.get(user) is not _Made.BIAS:
                user.replace_input_with(bias, _again(graph, user, _chain(bias, biases)))
    if changed or biases:
        graph.eliminate_dead_code(is_impure_node=is_impure)
        captured.module.recompile()
    return captured


# ---- attention


def _with_trained_mask(captured: CapturedGraph, made: dict[Node, _Made]) -> list[Node]:
    """Attentions whose mask has a gradient."""
    attention = aten.scaled_dot_product_attention.default
    masks = {n: sdpa_arguments(n)["attn_mask"] for n in made if n.target is attention}
    masks = {n: m for n, m in masks.items() if isinstance(m, Node) and made[m] is not _Made.DATA}
    if not masks:
        return []
    edges, differentiated = GradientEdges(captured.values), set(captured.differentiable)
    for node in made:
        if edges.of(node, differentiated):
            differentiated.add(node)
    return [n for n, mask in masks.items() if mask in differentiated]


def _write_out(graph: Graph, node: Node) -> None:
    """Attention as a product, a sum, a softmax and a product; in half precision, in float32."""
    call = sdpa_arguments(node)
    query, key, value = (call[name] for name in ("query", "key", "value"))
    own = tensors_of(node)[0].dtype

    def op(target: Any, *args: Any) -> Node:
        return insert(graph, node, target, *args)

    wide = torch.float32 if own in (torch.float16, torch.bfloat16) else own
    query, key, value = (cast(graph, node, n, wide) for n in (query, key, value))
    if call["enable_gqa"] and shape_of(query)[-3] != shape_of(key)[-3]:
        heads = int(shape_of(query)[-3] / shape_of(key)[-3])
        key, value = (_repeated(graph, node, n, heads) for n in (key, value))
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(int(shape_of(query)[-1]))
    scores = op(aten.mul.Tensor, op(aten.matmul.default, query, op(aten.transpose.int, key, -2, -1)), scale)
    weights = op(aten._safe_softmax.default, op(aten.add.Tensor, scores, call["attn_mask"]), -1)
    if call["dropout_p"]:
        weights = op(aten.dropout.default, weights, call["dropout_p"], True)
    found = cast(graph, node, op(aten.matmul.default, weights, value), own)
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def _repeated(graph: Graph, before: Node, value: Node, times: int) -> Node:
    """Each head (of (..., heads, T, d)) so many times, next to each other."""
    leading = tensors_of(value)[0].dim() - 2
    apart = insert(graph, before, aten.unsqueeze.default, value, leading)
    wide = insert(graph, before, aten.expand.default, apart, [-1] * leading + [times, -1, -1])
    return insert(graph, before, aten.flatten.using_ints, wide, leading - 1, leading)


# ---- who makes a bias


def _origins(captured: CapturedGraph) -> dict[Node, _Made]:
    found: dict[Node, _Made] = {}
    for node in captured.module.graph.nodes:
        if node.op != "output":
            found[node] = _origin(captured, node, {found[n] for n in operands(node)})
    return found


def _origin(captured: CapturedGraph, node: Node, made: set[_Made]) -> _Made:
    if node.op in ("placeholder", "get_attr"):
        if node not in captured.parameters and node not in captured.differentiable:
            return _Made.DATA
        return _Made.ROWS if _degree(captured, node) else _Made.WEIGHTS
    if made <= {_Made.DATA}:
        return _Made.DATA
    one_result = isinstance(node.meta.get("val"), torch.Tensor)
    one_result = one_result and isinstance(node.target, torch._ops.OpOverload)
    if _Made.ROWS in made or not one_result or is_random(node):
        return _Made.ROWS
    if is_returned(node) and node.target is not aten.detach.default:
        return _Made.ROWS  # whoever asks for its gradient asks for that of all readers
    degree = _degree(captured, node)
    if degree == 0 and _Made.BIAS not in made:
        return _Made.WEIGHTS
    return _Made.BIAS if degree > 1 else _Made.ROWS


def _degree(captured: CapturedGraph, node: Node) -> int:
    """In how many dims of the value the sequence length occurs."""
    assert captured.sequence is not None
    return max((shape_degree(v, captured.sequence) for v in tensors_of(node)), default=0)


def _chain(bias: Node, biases: list[Node]) -> list[Node]:
    """What a bias is made of that is one as well, and then it, in the order of the graph."""
    wanted, found = {bias}, list[Node]()
    for node in reversed(biases):
        if node in wanted:
            found.append(node)
            wanted.update(operands(node))
    return found[::-1]


def _again(graph: Graph, user: Node, chain: list[Node]) -> Node:
    """The last of these nodes once more, with those that it is made of, before a reader."""
    copies: dict[Node, Node] = {}
    with graph.inserting_before(user):
        for node in chain:
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
    return copies[chain[-1]]
