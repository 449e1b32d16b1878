"""Asks Dynamo to trace once more with the sequence length as a symbol.

NOTE [one more trace]: by default Dynamo takes all sizes of a first call for constants, and a graph of
constants does not say which of its numbers are the sequence length. So when such a graph reads along some
dim (an attention), the input dims of that length are declared dynamic and the trace is restarted, in the way
that PyTorch's own compiler restarts it when it finds that a number must be a tensor. It costs a second Dynamo
trace in the first call, and saves the compilation for the second length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._dynamo.utils import tensor_always_has_static_shape
from torch.fx import GraphModule, Node

from ..passes.s1_capture.capture import float_symbol
from ..passes.s1_capture.sequence_length import is_called, lengths_read
from ..versions.differences import DYNAMIC_DIMS
from .block_masks import declare_lengths, remove_lengths, table_sizes

# Set on an input tensor; read by Dynamo, and no guard depends on it.
MARK = DYNAMIC_DIMS
OURS = "_streambp_declared"


def declare_dynamic(
    module: GraphModule, example_inputs: Sequence[Any], seq_dim: Mapping[str, int] | None
) -> None:
    """Declare the dims that may be the sequence and restart Dynamo's trace; return if nothing is left to try.

    Args:
        module: a Dynamo graph in which no dynamic size is the sequence.
        example_inputs: its inputs, real tensors.
        seq_dim: dims by input name, where the user gave them.

    Raises:
        ValueError: `seq_dim` gives an input a dim that it does not have.
    """
    tensors = _tensor_inputs(module, example_inputs)
    found = [_named(tensors, seq_dim)] if seq_dim else [_of_read_lengths(module, tensors)]
    found.append(_one_off(module, tensors))
    tables = table_sizes(module)
    found[0] += [(v, tables[n]) for n, v in tensors if tables.get(n)]
    for wanted in found:
        if _declare(wanted) | declare_lengths(module):
            trace_again("the sequence length as a symbol")


def trace_again(why: str) -> NoReturn:
    """Restart Dynamo's trace.

    Dynamo keeps where in the code it may have to break the graph, and expects a second trace to come to the
    same places. One with symbols for sizes does not: it has ops earlier. So that is forgotten.

    Raises:
        TensorifyScalarRestartAnalysis: caught by Dynamo, which traces again.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=f"streambp: {why}")


def _declare(wanted: list[tuple[torch.Tensor, set[int]]]) -> bool:
    """Mark dims; False if all of them are marked already."""
    new = False
    for value, dims in wanted:
        declared = set(getattr(value, OURS, ()))
        if dims - declared:
            setattr(value, OURS, declared | dims)
            setattr(value, MARK, set(getattr(value, MARK, ())) | dims)
            new = True
    return new


# Ops that take a tensor of no dims as well as a number.
ARITHMETIC = {"mul", "add", "sub", "truediv", "div", "neg", "imul", "iadd", "isub", "itruediv"}


def specialize_floats(module: GraphModule) -> None:
    """Ask for constants where a changing float is used in a way that a tensor cannot stand in for it.

    NOTE [floats]: a Python float that may change (a loss weight) comes as a tensor of no dims whose `item()`
    the graph calls. As an operand of arithmetic the tensor itself serves, and the float may change without
    another compilation. As an argument that must be a number (a scale of attention) it cannot be traced at
    all; such floats become constants by the same restart that Inductor uses for them.

    Where the tensor serves, the result is given the dtype that it has with a number: a number gives way to
    every float, but a tensor of no dims makes float64 of another one, and of whole numbers.

    Raises:
        TensorifyScalarRestartAnalysis: caught by Dynamo, which traces again.
    """
    symbols = {n: float_symbol(n) for n in module.graph.find_nodes(op="placeholder")}
    items = {item: symbol for n, symbol in symbols.items() if symbol is not None for item in n.users}
    for item, symbol in items.items():
        if not all(_is_arithmetic(user, item) for user in item.users):
            TensorifyState.specialize(symbol)
            trace_again("a float as a constant")
    for item in items:
        for user in list(item.users):
            _keep_dtypes(user)
    module.recompile()


def _is_arithmetic(node: Node, operand: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name not in ARITHMETIC or operand in node.kwargs.values():
        return False
    return _is_tensor(node) or all(_is_arithmetic(user, node) for user in node.users)


def _keep_dtypes(node: Node) -> None:
    """Cast what is made of a float and a tensor to the dtype that Dynamo found for it."""
    if not _is_tensor(node):
        for user in list(node.users):
            _keep_dtypes(user)
        return
    values = [n.meta["example_value"] for n in node.all_input_nodes if _is_tensor(n)]
    if all(v.dim() and (v.is_floating_point() or v.is_complex()) for v in values):
        return
    with node.graph.inserting_after(node):
        cast = node.graph.call_method("to", (node, node.meta["example_value"].dtype))
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def remove_declarations(module: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Leave the user's tensors, and PyTorch's settings, as they were."""
    remove_lengths()
    for _, value in _tensor_inputs(module, example_inputs):
        dims = getattr(value, OURS, None)
        if dims:
            left = set(getattr(value, MARK, ())) - dims
            delattr(value, OURS)
            setattr(value, MARK, left) if left else delattr(value, MARK)


def _tensor_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> list[tuple[Node, torch.Tensor]]:
    """Inputs whose sizes Dynamo can be asked to keep open: tensors that belong to no module."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    found = []
    for node, value in zip(nodes, example_inputs, strict=True):
        argument = node.meta.get("grapharg")
        if not isinstance(value, torch.Tensor) or argument is None:
            continue
        if not tensor_always_has_static_shape(value, is_tensor=True, tensor_source=argument.source)[0]:
            found.append((node, value))
    return found


def _of_read_lengths(
    module: GraphModule, tensors: list[tuple[Node, torch.Tensor]]
) -> list[tuple[torch.Tensor, set[int]]]:
    """Dims that are as long as what the graph reads along; all, if none is."""
    lengths = {size for size in lengths_read(module) if size > 1}
    if not lengths:
        return []
    found = [(v, {d for d, size in enumerate(v.shape) if int(size) in lengths}) for _, v in tensors]
    if not any(dims for _, dims in found):
        found = [(v, {d for d, size in enumerate(v.shape) if size > 1}) for _, v in tensors]
    return _with_samples([(v, dims) for v, dims in found if dims])


def _with_samples(found: list[tuple[torch.Tensor, set[int]]]) -> list[tuple[torch.Tensor, set[int]]]:
    """The first dim as well, where the sequence is the second: the batch size, which will change like it."""
    return [(v, dims | {0} if 1 in dims and v.shape[0] > 1 else dims) for v, dims in found]


def _one_off(
    module: GraphModule, tensors: list[tuple[Node, torch.Tensor]]
) -> list[tuple[torch.Tensor, set[int]]]:
    """Dims that are longer or shorter by one.

    NOTE [one per prediction]: what belongs to the predictions (old log-probabilities, advantages, a mask) is
    often shorter than the tokens by one. Where it meets them, a constant length makes theirs a constant.
    """
    lengths = {size + d for size in lengths_read(module) if size > 2 for d in (-1, 1)}
    found = [(v, {d for d, size in enumerate(v.shape) if int(size) in lengths}) for _, v in tensors]
    return [(v, dims) for v, dims in found if dims]


def _named(
    tensors: list[tuple[Node, torch.Tensor]], seq_dim: Mapping[str, int]
) -> list[tuple[torch.Tensor, set[int]]]:
    """The dims that the user names, and that of another input that is as long, if it has one: labels, a mask.

    Where it meets the tokens, a constant length makes that of the tokens a constant.
    """
    found = []
    for name, dim in seq_dim.items():
        for node, value in tensors:
            if not is_called(node, name):
                continue
            if not -value.dim() <= dim < value.dim():
                shape = tuple(int(s) for s in value.shape)
                raise ValueError(f"seq_dim[{name!r}] is {dim}, but the input has the shape {shape}")
            if value.shape[dim] > 1:
                found.append((value, {dim % value.dim()}))
    lengths = {value.shape[d] for value, dims in found for d in dims}
    others = [v for n, v in tensors if not any(is_called(n, name) for name in seq_dim)]
    same = [(v, {d for d, size in enumerate(v.shape) if size in lengths}) for v in others]
    return _with_samples([*found, *((v, dims) for v, dims in same if len(dims) == 1)])
