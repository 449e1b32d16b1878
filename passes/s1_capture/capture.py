"""capture: a Dynamo graph -> one pre-dispatch ATen FX graph, symbolic in the sequence length.

At the pre-dispatch level `linear`, `layer_norm`, `scaled_dot_product_attention` and
`cross_entropy_loss` are still single nodes, so a decoder is some 40 distinct ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..graph.autograd_functions import Retrace
from ..graph.facts import CapturedGraph, expression, shape_of, tensors_of
from ..graph.functionalization import changes_inside, changes_something, functional
from ..graph.memory import Memory
from ..graph.refusals import MutationError, NotPureError
from ..graph.sources import source_expression, source_name
from ..graph.symbols import Lengths, SymbolTable, new_fake_mode
from ..graph.tracing import trace
from ..pipeline.log import tell_share
from .higher_order import without_higher_order_ops
from .refused_effects import refuse_effects, refuse_regions, refuse_strides, refuse_transforms


def _fake_input(value: object, table: SymbolTable, mode: FakeTensorMode) -> object:
    if isinstance(value, torch.SymInt):
        return table.translate(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [table.translate(s) for s in value.shape]  # sizes get their symbols first
    with mode:
        if table.lengths is not None and has_own_strides(value, table.lengths):
            fake = torch.empty(shape, dtype=value.dtype, device=value.device)
        else:
            stride = [table.translate(s) for s in value.stride()]
            fake = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return fake.requires_grad_(value.requires_grad)


def has_own_strides(value: torch.Tensor, lengths: Lengths) -> bool:
    """True if strides of an input do not follow from sizes: it is a slice of something longer.

    They are symbols of Dynamo's that no size has. Such an input is captured, and handed over, contiguous.

    Args:
        value: the input, of any shape and dtype; only its strides are looked at.
        lengths: the symbols of the graph's sizes.
    """
    symbols = {s for stride in value.stride() for s in expression(stride).free_symbols}
    return not symbols <= set(lengths.values)


def capture(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    lengths: Lengths | None = None,
) -> CapturedGraph:
    """Retrace a Dynamo graph to pre-dispatch ATen under a fake mode of its own.

    NOTE [fresh fake mode]: Dynamo's fake inputs belong to Dynamo's mode and cannot be mixed with
    another. The inputs are made anew, each Dynamo symbol mapped to one new symbol, so that sizes that
    were equal stay equal and no guard on them appears.

    Args:
        module: what Dynamo hands to a backend.
        example_inputs: its inputs (real or fake tensors, ints, SymInts).
        lengths: which sizes are the sequence length; None keeps every symbol apart.
    """
    given, module = module, without_higher_order_ops(module)
    refuse_transforms(module)
    mode = new_fake_mode()
    assert mode.shape_env is not None
    table = SymbolTable(mode.shape_env, lengths)
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    examples = [n.meta.get("example_value", e) for n, e in zip(nodes, example_inputs, strict=True)]
    make_inputs = lambda: [_fake_input(value, table, mode) for value in examples]  # noqa: E731
    inputs = make_inputs()
    traced, written = _trace(module, mode, make_inputs)
    for graph_module in (module, traced):
        refuse_effects(graph_module)
    refuse_regions(traced.graph.nodes)
    refuse_strides(traced.graph.nodes)
    if lengths is not None and not lengths.fixed and _coincide(table, lengths):
        return capture(given, example_inputs, dataclasses.replace(lengths, fixed=True))
    result = CapturedGraph(traced, autocast=is_autocast_on(traced))
    result.guards = [guard.expr for guard in mode.shape_env.guards]
    result.values = table.values()
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    result.written = [placeholders[k] for k in written]
    for old, new, given, example in zip(nodes, placeholders, inputs, examples, strict=True):
        new.meta.setdefault("val", given)  # a number leaves no trace of its own
        new.meta["source"] = source_expression(old)
        if not isinstance(example, torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(example):
            result.opaque[new] = type(example).__name__
        if lengths is not None and has_own_strides(example, lengths):
            result.laid_out.add(new)
        if isinstance(example, torch.nn.Parameter):
            result.parameters[new] = source_name(old)
        if example.requires_grad:
            result.differentiable.add(new)
    result.sequence = _sequence(placeholders) if lengths is None else _symbol(table.found(lengths.sequence))
    return result


def _trace(
    module: torch.fx.GraphModule,
    mode: FakeTensorMode,
    make_inputs: Callable[[], list[object]],
) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph without changes in place, and the positions of the inputs whose new values it returns last.

    See NOTE [changes in place].

    Raises:
        MutationError: it changes something in a way that has no functional form.
    """
    floats = frozenset(n for n in module.graph.find_nodes(op="placeholder") if float_symbol(n) is not None)
    memory = Memory()
    with mode, fx_traceback.preserve_node_meta():
        inputs = make_inputs()
        memory.see(inputs)
        run = Retrace(module, floats, memory, tell_share).run
        try:
            traced = trace(run, *inputs, pre_dispatch=True)
        except RuntimeError as error:
            if "leaf Variable" not in str(error):
                raise
            # made for the trace; in the model it is the result of something, or eager refuses it as well
            raise MutationError("an input that has a gradient is changed in place") from error
        nodes = list(traced.graph.nodes)
        if not (memory.changed or any(map(changes_something, nodes)) or changes_inside(nodes)):
            return traced, []
        memory, written = Memory(), list[int]()
        run = functional(Retrace(module, floats, memory, tell_share).run, memory, written)
        try:
            traced = trace(run, *make_inputs(), pre_dispatch=True)
        except NotPureError:
            raise
        except Exception as error:
            if _is_ours(error):
                raise
            reason = str(error).strip().split("\n", 1)[0]
            raise MutationError(f"its changes in place have no functional form ({reason})") from error
        if any(map(changes_something, traced.graph.nodes)):
            raise MutationError("some of its changes in place have no functional form")
        return traced, written


def _is_ours(error: Exception) -> bool:
    """True for a bug of this project, which is no fact about the graph: its own code misses a name, say."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, (NameError, AttributeError, LookupError, AssertionError)):
        return False
    raised_in = trace.tb_frame.f_globals.get("__name__", "")
    return raised_in.startswith(__name__.split(".s1_capture")[0])


def _coincide(table: SymbolTable, lengths: Lengths) -> bool:
    """True if tracing took a number or another size for the sequence length, since both had the same value.

    A size that tracing has found to be a multiple of the length, say, stays that: a guard says so.
    """
    sequence = _symbol(table.found(lengths.sequence))
    return sequence is None or sequence in table.found(lengths.others)


def _symbol(found: list[sympy.Expr]) -> sympy.Symbol | None:
    return found[0] if len(found) == 1 and isinstance(found[0], sympy.Symbol) else None


def _sequence(placeholders: list[torch.fx.Node]) -> sympy.Symbol | None:
    """The only symbol in the sizes of input tensors, or None.

    Strides have symbols of their own where an input is a slice of something longer; they do not count.
    """
    sizes = [size for n in placeholders if tensors_of(n) for size in shape_of(n)]
    return _symbol(list({s for size in sizes for s in size.free_symbols}))


def float_symbol(placeholder: torch.fx.Node) -> str | None:
    """Name of the symbol of a Python float that comes as a tensor of no dims, or None for other inputs."""
    memo = getattr(placeholder.meta.get("example_value"), "item_memo", None)
    users = placeholder.users
    if memo is None or not users or not all(u.op == "call_method" and u.target == "item" for u in users):
        return None
    return getattr(memo.node._expr, "name", None)


def is_autocast_on(module: torch.fx.GraphModule) -> bool:
    """True if autocast is on for a device of the graph's tensors."""
    devices = {v.device.type for n in module.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    return any(torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d) for d in devices)
