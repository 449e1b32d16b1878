"""chunk_ops: how ops are written in a chunk program where they are not simply themselves.

Views take the sizes of the chunk; products with repeated heads do not repeat them; attention goes by blocks.
One small function an op, registered with `@emit(op)`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.facts import Axis, Facts, Layout, Mask, Role, tensors_of
from ..graph.op_arguments import arguments, sdpa_arguments
from ..graph.ops.causal_convolution import CAUSAL_CONV1D, causal_conv1d, rows_before
from ..graph.ops.recurrence import RECURRENCE
from ..rules.op_sets import EXPANDS, RESHAPES
from ..rules.pointwise import LIKE_ANOTHER
from .attention_kernels import AttentionBlock, choose
from .carried_state import Size, grouped_columns
from .columns_of_others import NotByBlocks
from .evaluation import Evaluation, emit
from .prefix_attention import PrefixAttention, attend, attend_plainly, causal_block

aten = torch.ops.aten


@emit(*RESHAPES)
def reshape(run: Evaluation, node: Node, role: Role) -> Tensor:
    """A view with the sizes of the chunk."""
    return run.operand(node.args[0], role).reshape(run.local_shape(node, role))


@emit(aten.repeat_interleave.self_int)
def repeat_interleave(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Without the size of the result, which is that of all rows."""
    call = arguments(node)
    return run.operand(call["self"], role).repeat_interleave(call["repeats"], call["dim"])


@emit(*EXPANDS)
def expand(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Repeated to the sizes of the chunk."""
    return run.operand(node.args[0], role).expand(run.local_shape(node, role))


@emit(aten.addcmul.default, aten.addcdiv.default, aten.lerp.Tensor, aten.lerp.Scalar)
def broadcast(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Operands, each with the sizes of the result.

    PyTorch's way to make them alike knows no symbolic sizes under `torch.func`.
    """
    layout = run.facts.layouts[node]
    shape = run.local_shape(node, role)
    operands = [run.aligned(n, role, layout).expand(shape) if isinstance(n, Node) else n for n in node.args]
    return node.target(*operands, **node.kwargs)


@emit(aten.hardshrink.default, aten.softshrink.default)
def shrink(run: Evaluation, node: Node, role: Role) -> Tensor:
    """By comparisons: the ops' own backwards know no symbolic sizes."""
    call = arguments(node)
    value, bound = run.operand(call["self"], role), call["lambd"]
    moved = value - torch.sign(value) * bound if node.target is aten.softshrink.default else value
    return torch.where((value >= -bound) & (value <= bound), torch.zeros_like(value), moved)


@emit(aten.pad.default, aten.constant_pad_nd.default)
def pad(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Padding with a constant by slices and joins: `constant_pad_nd` knows no symbolic sizes.

    A negative amount cuts off.
    """
    call = arguments(node)
    if call.get("mode", "constant") != "constant":
        return run.call(node, role, None)
    value, number = run.operand(call["self"], role), call["value"] or 0
    amounts = [run.operand(n, role) if isinstance(n, Node) else n for n in call["pad"]]
    for k, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = value.dim() - 1 - k
        first, last = (-n if n < 0 else 0 for n in (before, after))
        if first or last:
            value = value.narrow(dim, first, value.shape[dim] - first - last)
        sides = [
            value.new_full(_with_size(value, dim, n), number) if n > 0 else None for n in (before, after)
        ]
        parts = [p for p in (sides[0], value, sides[1]) if p is not None]
        value = torch.cat(parts, dim) if len(parts) > 1 else value
    return value


def _with_size(value: Tensor, dim: int, size: Size) -> list[Size]:
    """Sizes of a value, with another one in one dim."""
    return [size if d == dim else s for d, s in enumerate(value.shape)]


@emit(aten.one_hot.default)
def one_hot(run: Evaluation, node: Node, role: Role) -> Tensor:
    """By a comparison: `one_hot` itself looks at the numbers, which a trace has not."""
    call = arguments(node)
    value = run.operand(call["self"], role)
    return (value.unsqueeze(-1) == torch.arange(call["num_classes"], device=value.device)).to(torch.int64)


@emit(*LIKE_ANOTHER)
def cast_like(run: Evaluation, node: Node, role: Role) -> Tensor:
    """A cast; the tensor that lends its dtype is not needed on the chunk."""
    return run.operand(node.args[0], role).to(tensors_of(node)[0].dtype)


@emit(aten._conj.default)
def conjugate(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Written out: a program writes into memory, which does not say that it is to be read as conjugated."""
    return run.operand(node.args[0], role).conj_physical()


@emit(aten.view_as_complex.default)
def view_as_complex(run: Evaluation, node: Node, role: Role) -> Tensor:
    """A chunk of rows may lie in memory in a way that has no complex view: then it is copied."""
    return torch.view_as_complex(run.operand(node.args[0], role).contiguous())


@emit(aten.dropout.default)
def dropout(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Dropout whose random numbers can be drawn again in the backward."""
    value = run.operand(node.args[0], role)
    return run.dropout(node, value, node.args[1]) if node.args[2] else value


@emit(aten.linear.default)
def linear(run: Evaluation, node: Node, role: Role) -> Tensor:
    """With a bias: the one product that PyTorch makes of it.

    PyTorch's own way there asks a tensor for its sizes, which under `torch.func` become numbers: the program
    would serve one chunk length only.
    """
    given = [*node.args, *node.kwargs.values()]
    if len(given) < 3 or given[2] is None:
        return run.call(node, role, None)
    rows, weight, bias = (run.operand(n, role) for n in given)
    if weight.dim() == 1:
        return torch.matmul(rows, weight) + bias
    if rows.dim() == 2:
        return aten.linear.default(rows, weight, bias)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    return torch.addmm(bias, flat, weight.t()).reshape(*rows.shape[:-1], weight.shape[0])


@emit(aten.cross_entropy_loss.default)
def cross_entropy(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Targets lie beside the rows, classes or probabilities of them; weights of classes do not."""
    call = arguments(node)
    axes = {"self": None, "target": layout_of_targets(run.facts, node), "weight": (None,)}
    values = {k: run.operand(v, role, axes[k]) if k in axes and v is not None else v for k, v in call.items()}
    return aten.cross_entropy_loss.default(**values)


def layout_of_targets(facts: Facts, node: Node) -> Layout | None:
    """Where the targets of a `cross_entropy_loss` have the rows of the logits, if they are data.

    It may be another order than that of what they are made of: `labels.reshape(-1)` of shape (rows, batch).
    """
    call = arguments(node)
    probabilities = tensors_of(call["target"])[0].dtype.is_floating_point
    return facts.layouts[call["self"] if probabilities else node]


@emit(aten.gather.default)
def gather(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Picked by data of rows and columns: by those of the chunk."""
    if node not in run.facts.mixings:
        return run.call(node, role, None)
    call = arguments(node)
    index = run.operand(call["index"], role, run.facts.layouts[node]).expand(run.local_shape(node, role))
    return run.operand(call["self"], role).gather(call["dim"], index)


@emit(RECURRENCE)
def recurrence(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Its step, from the state of the chunk before to the one that it leaves."""
    own: list[Any] = [None if n is None else run.operand(n, role) for n in node.args[1]]
    if node not in run.facts.mixings:  # a convolution along another dim than the sequence
        rows, weight, bias = own
        return causal_conv1d(rows, weight, bias, 1, rows.shape[1])
    return run.reader.recur(run.program.states[node], node.args, own)


@emit(aten.matmul.default)
def matmul(run: Evaluation, node: Node, role: Role) -> Tensor:
    """With grouped heads, the query heads of a group are rows of one product with the group's columns."""
    grouped = grouped_columns(node) if node in run.facts.mixings else None
    if grouped is None:
        return run.call(node, role, None)
    left, right = run.operand(node.args[0], role), run.operand(grouped.source, Role.COLUMN)
    batch, heads, rows, inner = left.shape
    folded = left.reshape(batch, heads // grouped.groups, grouped.groups * rows, inner)
    product = folded @ (right.transpose(2, 3) if grouped.transposed else right)
    return product.reshape(batch, heads, rows, product.shape[-1])


@emit(CAUSAL_CONV1D)
def causal_convolution(run: Evaluation, node: Node, role: Role) -> Tensor:
    """The rows of the chunk and those before them that it reads, which are zeros before the first."""
    if node not in run.facts.mixings:  # along another dim than the sequence
        return run.call(node, role, None)
    call = arguments(node)
    columns = run.operand(call["input"], Role.COLUMN)
    weight, bias = (run.operand(n, role) if n is not None else None for n in (call["weight"], call["bias"]))
    before, state = rows_before(node), run.program.states.get(call["input"])
    there = run.ranges.prefix if state is None else state.columns_before(run.ranges)
    last = there if there < before else before
    read = columns.narrow(-1, there - last, last + run.ranges.rows)
    if last is not before:
        read = torch.cat([read.new_zeros((*read.shape[:2], before - last)), read], -1)
    if weight is None:
        return read.narrow(-1, 0, run.ranges.rows)
    groups = run.operand(call["groups"], role) if isinstance(call["groups"], Node) else call["groups"]
    return torch.nn.functional.conv1d(read, weight, bias, 1, 0, call["dilation"], groups)


@emit(aten.baddbmm.default)
def baddbmm(run: Evaluation, node: Node, role: Role) -> Tensor:
    """The product of the chunk's rows with the columns so far, then the addend's rows."""
    bias, left, right = node.args[:3]
    addend = run.aligned(bias, role, run.facts.layouts[node])
    right_role = Role.COLUMN if node in run.facts.mixings else role
    product = run.operand(left, role), run.operand(right, right_role)
    alpha, beta = (node.kwargs.get(k, 1) for k in ("alpha", "beta"))
    scores = torch.bmm(*product)
    scores = scores if alpha == 1 else scores * alpha
    if beta == 0:  # PyTorch does not look at the addend then: what is infinite in it goes nowhere
        return scores
    return scores + (addend if beta == 1 else addend * beta)


@emit(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(run: Evaluation, node: Node, role: Role) -> Tensor:
    """By blocks where the mask is plain causal, else under the chunk's own rows of the mask."""
    if node not in run.facts.mixings:  # keys and values are no rows of the sequence
        return run.call(node, role, None)
    call = sdpa_arguments(node)
    query = run.operand(call["query"], role)
    mask_node = call["attn_mask"]
    plain = isinstance(mask_node, Node) and Mask.of(mask_node) in run.program.plain
    causal = call["is_causal"] or plain
    mask = _mask_rows(run, mask_node) if mask_node is not None and not causal else None
    in_place = _in_place(run, call["key"], call["value"]) if call["dropout_p"] == 0.0 else None
    kernel = None if in_place is None else choose(query, in_place[2], in_place[3], mask)
    if in_place is not None and kernel is not None:
        bias = kernel.bias(mask, query, in_place[2])
        extra = (run.ranges.prefix, causal, call["scale"], run.reader.pieces, run.ranges.of_others)
        if causal or not run.ranges.of_others:
            return PrefixAttention.apply(query, *in_place, bias, kernel, *extra)[0]
    if run.ranges.of_others:
        raise NotByBlocks("no kernel reads the columns of other devices block by block")
    key, value = (run.operand(call[k], Role.COLUMN) for k in ("key", "value"))
    kernel = choose(query, key, value, mask) if call["dropout_p"] == 0.0 else None
    if kernel is not None and not torch.is_grad_enabled():
        bias = kernel.bias(mask, query, key)
        return attend(kernel, query, key, value, bias, run.ranges.prefix, causal, call["scale"])[0]
    if causal:
        mask = _causal_block(run, query)
    if call["dropout_p"] == 0.0:
        return _on_columns(query, key, value, mask, call["scale"], call["enable_gqa"])
    drop = lambda w: run.dropout(node, w, call["dropout_p"])  # noqa: E731
    return attend_plainly(query, key, value, mask, call["scale"], drop)


def _on_columns(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, grouped: bool
) -> Tensor:
    """Without gradient buffers, where reads are differentiated as columns: by PyTorch's own backward.

    NOTE [the kernel that eager uses]: where every score of a row is the same huge negative number, kernels
    differ in more than rounding, so on a CPU the same one is taken: heads that are broadcast and not declared
    as grouped make PyTorch fall back to plain products. On CUDA it could take cuDNN's, which gives a row that
    sees nothing a mean of values, see NOTE [numbers of kernels].
    """
    kernel = choose(query, key, value, mask, by_autograd=True)
    if kernel is None or (query.shape[1] != key.shape[1] and not grouped):
        return attend_plainly(query, key, value, mask, scale, grouped=grouped)
    bias = kernel.bias(mask, query, key)
    return kernel.forward(AttentionBlock(query, key, value, bias, scale=scale))[0]


def _causal_block(run: Evaluation, query: Tensor) -> Tensor:
    ranges = run.ranges
    return causal_block(ranges.prefix, ranges.rows, ranges.columns, query.device)


def _mask_rows(run: Evaluation, mask: Node) -> Tensor:
    rank = tensors_of(mask)[0].dim()
    axes = (*(None,) * max(0, rank - 2), Axis(), Axis(Role.COLUMN))[-rank:]
    return run.operand(mask, Role.ROW, axes)


def _in_place(run: Evaluation, key: Node, value: Node) -> list[Tensor] | None:
    """Operands of an attention that adds to the state-gradient buffers itself.

    Own key and value rows, the columns of both, their gradient buffers shaped alike, and the own rows of
    these. None where gradients are not kept in place, a state has several readers, or more than a view lies
    between a state and the attention.
    """
    own, columns, gradients, own_gradients = [], [], [], []
    for node in (key, value):
        sources = run.program.sources(node)
        if len(sources) != 1 or run.program.readers.get(sources[0], 0) != 1:
            return None
        buffers = run.reader.buffers_of(run.program.states[sources[0]])
        if buffers is None:
            return None
        views = [_as_view(run, node, sources[0], b) for b in buffers[:2]]
        if views[0] is None or views[1] is None:
            return None
        own.append(run.values[sources[0], Role.ROW])
        columns.append(views[0])
        gradients.append(views[1])
        own_gradients.append(buffers[2])
    return [*own, *columns, *gradients, *own_gradients]


def _as_view(run: Evaluation, node: Node, source: Node, buffer: Tensor) -> Tensor | None:
    """The ops between a state and its reader, applied to another buffer, if all of them are views."""
    chain = []
    while node is not source:
        chain.append(node)
        node = node.args[0]
    value = buffer
    for step in reversed(chain):
        if step.target in RESHAPES:
            try:
                value = value.view(run.local_shape(step, Role.COLUMN))
            except (RuntimeError, ValueError):  # not a view of this buffer
                return None
        elif step.target in (aten.transpose.int, aten.permute.default, aten.unsqueeze.default):
            value = step.target(value, *step.args[1:])
        else:
            return None
    return value
