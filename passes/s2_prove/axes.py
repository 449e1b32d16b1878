"""axes: what kind of value each node is, and which of its dims carries the sequence.

Axes come from the inputs that were declared to carry the sequence and are moved by op rules. A size
that happens to equal the sequence length says nothing: the sequence is a symbol, not a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.autograd_functions import CustomFunction
from ..graph.facts import (
    COLUMN_AXIS,
    ROW_AXIS,
    CapturedGraph,
    Facts,
    Kind,
    Layout,
    Mixing,
    NotSeparable,
    operands,
    shape_of,
    tensors_of,
)
from ..graph.ops.row_selection import RowSelection
from ..graph.purity import is_random
from ..graph.refusals import MutationError, NotPureError, NumberError
from ..graph.sources import is_kept_by_model, path
from ..rules import Rule, RuleContext, rule_for
from ..rules.asking import ask
from ..rules.pointwise import align, pointwise
from .autograd_function_rows import FunctionCall, has_linear_backward
from .gradient_edges import GradientEdges, reached
from .inner_outputs import refuse_weights
from .row_selections import SelectionCall

UNKNOWN = "the sequence axis of"


def axes(captured: CapturedGraph, merged: Mapping[Node, Layout] | None = None) -> Facts:
    """Kinds and layouts of all nodes of a normalized graph.

    Args:
        merged: layouts of inputs in which the sequence is merged with other dims.

    Raises:
        MutationError: an input is changed in place to a value that has a gradient.
    """
    facts = Facts(captured.module, captured.sequence, captured.parameters, captured.differentiable)
    facts.guards, facts.values, facts.opaque = captured.guards, captured.values, dict(captured.opaque)
    facts.written, facts.laid_out = captured.written, captured.laid_out
    facts.asked, facts.where_asked = captured.asked, captured.where_asked
    context, gradients = RuleContext(facts), GradientEdges(facts.values)
    for node in facts.nodes:
        if node.op == "output":
            continue
        facts.kinds[node] = _kind(facts, node)
        if not is_kept_by_model(node) and (not operands(node) or facts.of_call.intersection(operands(node))):
            facts.of_call.add(node)
        sources = gradients.of(node, facts.needs_grad)
        if sources or (node.op == "placeholder" and node in facts.differentiable):
            facts.needs_grad.add(node)
            facts.sources[node] = sources
        if merged and node in merged:
            facts.layouts[node] = merged[node]
        elif facts.kinds[node] in (Kind.STREAM, Kind.WHOLE, Kind.CONSTANT, Kind.REDUCED):
            facts.layouts[node] = _layout(facts, context, node)
        if node in facts.local:  # made by each chunk, though it may have no rows
            facts.kinds[node] = Kind.STREAM
    facts.needs_grad = _reached_by_gradients(facts)
    for node, value in zip(facts.written, facts.new_values, strict=True):
        if value in facts.needs_grad:
            raise MutationError(f"the input {path(node)!r} is changed to a value that has a gradient")
    refuse_weights(facts)
    _refuse_numbers(facts)
    _refuse_opaque_weights(facts)
    _refuse_functional_forms(facts)
    return facts


def check_sequence(facts: Facts) -> Facts:
    """Nothing that is asked of fake tensors may make a constant of the sequence length.

    Raises:
        RuntimeError: it did, and the other passes would take the length of one call for that of all.
    """
    inputs = [n for n in facts.nodes if n.op == "placeholder" and tensors_of(n)]
    if facts.sequence is not None and not any(facts.carries(n) for n in inputs):
        raise RuntimeError("the sequence length has become a constant")
    return facts


def _refuse_opaque_weights(facts: Facts) -> None:
    """Raise if a value made of parameters alone may not be made anew: each chunk and segment does.

    Random numbers would be others each time. A backward that its author wrote would be given the gradients
    of chunks one by one, and not their sum. What a layer makes of a context is made by its chunks as well,
    unless it is refused.

    Raises:
        NotPureError: it may not.
    """
    for node in facts.nodes:
        inside = node in facts.context
        if node.op != "call_function" or not (inside or facts.kinds.get(node) is Kind.CONSTANT):
            continue
        reason = _why_made_once(facts, node)
        if reason and inside:
            facts.refusals[node] = reason
        elif reason:
            raise NotPureError(reason, node)


def _why_made_once(facts: Facts, node: Node) -> str:
    if is_random(node):
        return "random numbers are drawn for a value that is made of parameters"
    custom = isinstance(node.target, CustomFunction)
    if custom and node in facts.needs_grad and not has_linear_backward(facts, node):
        return (
            "a custom autograd function, whose backward may not be linear, is applied to a value that is "
            "made of parameters"
        )
    return ""


def _refuse_functional_forms(facts: Facts) -> None:
    """Raise if functionalization wrote an op that changes an operand which its backward reads.

    Such an op has a form of its own ("..._functional") whose derivative reads the operand as it was before:
    random numbers that were not drawn yet, in `rrelu_`.

    Raises:
        MutationError: it did.
    """
    for node in facts.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.endswith("_functional") and node in facts.needs_grad:
            raise MutationError(f"{node.target} has another gradient than the change in place", node)


def _refuse_numbers(facts: Facts) -> None:
    """Raise if a number is taken from the values of a tensor (`item()` in a hook): it is no size.

    How many rows were selected by their values is such a number where it is used beside those rows.

    Raises:
        NumberError: it is.
    """
    for node in facts.nodes:
        if node.op != "call_function" or tensors_of(node):
            continue
        value = node.meta.get("val")
        if value is not None and free_unbacked_symbols(value) and any(map(tensors_of, node.all_input_nodes)):
            raise NumberError("a number is taken from the values of a tensor", node)


def _reached_by_gradients(facts: Facts) -> set[Node]:
    """Of the differentiable nodes those that a gradient of an output comes to."""
    outputs = facts.module.graph.output_node().all_input_nodes
    return reached(facts, [n for n in outputs if n in facts.needs_grad])


def _kind(facts: Facts, node: Node) -> Kind:
    if not tensors_of(node):
        return Kind.SIZE
    degree = facts.degree(node)
    if node.op == "placeholder":
        if node in facts.parameters or node in facts.differentiable:
            return Kind.STREAM if degree else Kind.CONSTANT
        return Kind.WHOLE if degree < 2 else Kind.SQUARE
    kinds = {facts.kinds[n] for n in operands(node)}
    if degree and kinds & {Kind.STREAM, Kind.REDUCED, Kind.CONSTANT}:
        return Kind.STREAM
    if _is_context(facts, node, kinds):
        facts.context.add(node)
        return Kind.REDUCED
    if kinds & {Kind.STREAM, Kind.REDUCED}:
        return Kind.REDUCED
    if Kind.CONSTANT in kinds:
        return Kind.CONSTANT
    return Kind.SQUARE if degree > 1 or Kind.SQUARE in kinds else Kind.WHOLE


def _is_context(facts: Facts, node: Node, kinds: set[Kind]) -> bool:
    """True for a value without the sequence that is worked out of parameters and of other inputs.

    NOTE [context]: what an encoder gives, or the tower of a picture, is read by rows of the sequence and
    has none of its own. A weight that is scaled is as cheap to make anew in each chunk as to read; a tower
    is not. What tells them apart is an op of parameters and data that is neither elementwise nor a view.
    What a model keeps in buffers (the vectors of spectral norm) is no data.
    Such a value, and all that is made of it without the sequence, is made once, before what reads it.
    """
    if kinds & {Kind.STREAM, Kind.REDUCED}:
        reduced = [n for n in operands(node) if facts.kinds[n] is Kind.REDUCED]
        return Kind.STREAM not in kinds and facts.context.issuperset(reduced)
    data = any(n in facts.of_call and facts.kinds[n] is Kind.WHOLE for n in operands(node))
    target = node.target
    cheap = torch.Tag.pointwise in getattr(target, "tags", ()) or getattr(target, "is_view", False)
    return Kind.CONSTANT in kinds and data and not cheap


def custom_layout(context: RuleContext, node: Node) -> Layout:
    """Rows of a custom autograd function stay rows if all ops of forward and backward are elementwise on one
    shape, or by their rules.
    """
    call = FunctionCall(context.facts, node)
    if not call.is_linear():
        context.facts.not_linear.add(node)
    if call.is_elementwise():
        return align(context, call.tensors[0], call.tensors)
    context.seen.update(call.tensors)
    return call.layout(_inner_axes(call))


def selection_layout(context: RuleContext, node: Node) -> Layout:
    """Rows that are selected, worked on and put back, by the rules of the ops."""
    call = SelectionCall(context.facts, node)
    context.seen.update(n for n in operands(node))
    return call.layout(_inner_axes(call))


def _inner_axes(call: FunctionCall | SelectionCall) -> Facts:
    """Kinds and layouts of the ops that a node is made of.

    Raises:
        NotSeparable: they do something beside computing values of each row; whole, the node may.
    """
    try:
        return axes(call.captured, call.merged)
    except NotPureError as error:
        raise NotSeparable(error.reason) from error


def _layout(facts: Facts, context: RuleContext, node: Node) -> Layout | None:
    if node.op in ("placeholder", "get_attr"):
        # NOTE [seeds]: inputs whose size is the declared sequence symbol itself carry the sequence.
        return tuple(ROW_AXIS if s == facts.sequence else None for s in shape_of(node))
    opaque = next((facts.opaque[n] for n in operands(node) if n in facts.opaque), None)
    if not any(facts.carries(n) or n in facts.local for n in (node, *operands(node))):
        if opaque is not None:
            facts.opaque[node] = opaque
        return (None,) * tensors_of(node)[0].dim()
    function = rule_for(facts, node)
    if isinstance(node.target, CustomFunction) and function is None:
        function = custom_layout
    if isinstance(node.target, RowSelection):
        function = selection_layout
    try:
        if opaque is not None:
            raise NotSeparable(f"a weight of it is a {opaque}, which has operations of its own")
        if function is None:
            raise NotSeparable(f"no rule for {node.target}")
        if any(free_unbacked_symbols(tensors_of(n)) for n in (node, *operands(node))):
            raise NotSeparable("a size of it is known only when it runs")
        if facts.kinds[node] is Kind.WHOLE:
            return ask(_whole_rows(function), context, node)
        return _bias(function, context, node) if _has_no_rows(facts, node) else ask(function, context, node)
    except NotSeparable as refusal:
        if facts.kinds[node] in (Kind.STREAM, Kind.REDUCED):
            facts.refusals[node] = str(refusal)
            return _healed(facts, context, node)
        return _whole(facts, node)


def _has_no_rows(facts: Facts, node: Node) -> bool:
    """True for a streamed value that is made of parameters, and of data of rows and columns, alone."""
    kinds = {facts.kinds[n] for n in operands(node) if facts.carries(n)}
    reduced = any(facts.kinds[n] is Kind.REDUCED for n in operands(node))
    return facts.kinds[node] is Kind.STREAM and kinds == {Kind.SQUARE} and not reduced


def _bias(function: Rule, context: RuleContext, node: Node) -> Layout:
    """The layout of a bias by place, see NOTE [places]. Its columns come into being here, as scores do.

    Raises:
        NotSeparable: the rule refuses it.
    """
    context.places = True
    try:
        found = ask(function, context, node)
    finally:
        context.places = False
    if COLUMN_AXIS in found:
        context.facts.biases.add(node)
        context.mixes(Mixing(node, columns=()))
    return found


def _whole_rows(function: Rule) -> Rule:
    """A rule, and rows in the dims of a whole value that have the size of the sequence symbol."""

    def layout(context: RuleContext, node: Node) -> Layout:  # NOTE [whole values]
        found, sequence = function(context, node), context.facts.sequence
        sizes = shape_of(node)
        if len(found) != len(sizes):
            return found
        return tuple(
            ROW_AXIS if a is None and s == sequence else a for a, s in zip(found, sizes, strict=True)
        )

    return layout


def _whole(facts: Facts, node: Node) -> Layout | None:
    """Axes of a whole value that no rule explains: its dims of the size of the sequence symbol.

    NOTE [whole values]: such a value is computed from all of the sequence before anything is sliced, so
    its axis makes no claim about dependence. It only says which dim a consumer's row i indexes, and a dim
    whose size is the sequence *symbol* is one that every consumer can index so.
    """
    shape = shape_of(node)
    if any(s != facts.sequence and facts.sequence in s.free_symbols for s in shape):
        return None
    return tuple(ROW_AXIS if s == facts.sequence else None for s in shape)


def _healed(facts: Facts, context: RuleContext, node: Node) -> Layout | None:
    """Rows of an elementwise result whose one operand is not understood.

    Broadcasting against a value with known rows still tells which dim carries the sequence; that the
    rows depend on all of the sequence is kept by the refusal, which keeps the region unchunked.
    """
    if rule_for(facts, node) is not pointwise or not facts.carries(node):
        return None
    known = [n for n in operands(node) if tensors_of(n) and facts.layouts.get(n) is not None]
    try:
        layout = align(context, node, known)
    except NotSeparable:
        return None
    complete = all(
        axis is not None or facts.sequence not in size.free_symbols
        for axis, size in zip(layout, shape_of(node), strict=True)
    )
    return layout if complete and any(layout) else None


def is_secondary(reason: str) -> bool:
    """True if a refusal only follows from an earlier one."""
    return reason.startswith(UNKNOWN)
