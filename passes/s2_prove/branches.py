"""branches: branches on data whose body changes nothing where the answer is no are always taken.

NOTE [branches on data] is in `graph.ops.branch`. The body of `if mask.any():` works on the rows of the mask
and puts them back: without such rows it leaves everything as it is. So the branch is the value that the body
makes. What is left of it is who has a gradient: eager leaves that of a parameter None which only bodies read
that were not run. So what was asked becomes a result of the graph, over all rows, that the caller does not
get (`CapturedGraph.asked`), and `CapturedGraph.where_asked` says which inputs have a gradient where which of
these hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import CapturedGraph, shape_of, tensors_of
from ..graph.ops.branch import BRANCH, PREDICATE, asked_by
from ..graph.refusals import ASKS, BranchError
from ..s1_capture.normalize import normalize
from .branch_bodies import PUTS, check_body, check_conditional, is_certain
from .emptiness import Name, Somewhere, is_mask, symbols_of_values
from .gradient_edges import GradientEdges

aten = torch.ops.aten
# Views and copies with the entries of their operand, in the same order.
IN_ORDER = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unsqueeze.default, aten.squeeze.dim, aten.contiguous.default, aten.clone.default,
}  # fmt: skip
# Of ways in which a gradient comes to an input: more than these are not kept apart.
MOST_WAYS = 512
# All of some predicates, by number, hold.
Way = frozenset[int]
ALWAYS: frozenset[Way] = frozenset([frozenset()])


def branches(captured: CapturedGraph) -> CapturedGraph:
    """Replace branches by the values of their bodies; in place. What they hid is brought to normal form then.

    Raises:
        BranchError: a body may change something where it would not be run.
    """
    graph = captured.module.graph
    found = [n for n in graph.nodes if n.target is BRANCH.default]
    if not found:
        return captured
    known, numbers, masks = Somewhere(graph), dict[Name, int](), list[Node]()
    asked: dict[Node, int] = {}
    within: dict[Node, set[Node]] = {n: set() for n in found}  # by op of a body, the branches around it
    trained = captured.differentiable & captured.parameters.keys()
    nodes = list(graph.nodes)
    order = {n: k for k, n in enumerate(nodes)}
    for node in found:
        name, mask, puts = _proved(known, node)
        body = nodes[order[asked_by(node)] : order[node]]
        check_body(known, name, body, puts, node, trained)
        for inner in body:
            within.setdefault(inner, set()).add(node)
        if name not in numbers:
            numbers[name] = len(masks)
            masks.append(mask)
        asked[node] = numbers[name]
    ways = _ways(captured, known, asked, within, dict(enumerate(numbers)))
    for node in found:
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        _read_without_copy(node)
    if ways:
        _return_answers(captured, masks)
        captured.where_asked = ways
    for node in reversed(found):
        _erase(node)
    return normalize(captured)


def _proved(known: Somewhere, branch: Node) -> tuple[Name, Node, set[Node]]:
    """The name of what a branch asks, a mask that has a true entry where it holds, and what puts rows.

    Raises:
        BranchError: without it, the body may make another value than what was there before.
    """
    predicate, taken, skipped, _ = branch.args
    assert isinstance(predicate, Node) and isinstance(taken, Node) and isinstance(skipped, Node)
    name, node, mask = known.name(predicate), taken, _of_predicate(predicate)
    way = set[Node]()
    while node is not skipped:
        way.add(node)
        own = _mask_of(known, node)
        if own is not None and name in known.implied(own):
            mask = own if known.name(own) == name else mask
        elif node.target not in IN_ORDER and node.target is not BRANCH.default:  # one within is proved before
            break
        operand = node.args[1 if node.target is BRANCH.default else 0]
        assert isinstance(operand, Node)
        node = operand
    if node is not skipped or mask is None or not _alike(taken, skipped):
        raise BranchError(
            "its code asks the values of a tensor, and what it does then is not shown to change only what "
            "these values select",
            branch,
        )
    return name, mask, way


def _of_predicate(predicate: Node) -> Node | None:
    """What is asked whether it has a true entry, if it is a value and not its opposite."""
    return predicate.args[0] if predicate.target is PREDICATE.default else None  # type: ignore[return-value]


def _mask_of(known: Somewhere, node: Node) -> Node | None:
    """The mask without whose true entries an op gives what it is given; None for another op."""
    if node.target not in PUTS:
        return None
    put = node.target is aten.index_put.default
    given: Any = node.args[1] if put else [node.args[2]]
    indices = [i for i in given if i is not None]
    if any(map(is_mask, indices)):
        return indices[0] if len(indices) == 1 else None
    symbols = set().union(*map(_symbols_of_length, indices))
    return known.mask(symbols.pop()) if len(symbols) == 1 else None


def _symbols_of_length(index: Node) -> set:
    """Numbers of selected rows of which an index has as many entries, or a multiple."""
    return {s for s in symbols_of_values(index) if any(size.subs(s, 0) == 0 for size in shape_of(index))}


def _alike(node: Node, other: Node) -> bool:
    one, two = tensors_of(node)[0], tensors_of(other)[0]
    return one.dtype == two.dtype and shape_of(node) == shape_of(other)


# ---- gradients


def _ways(
    captured: CapturedGraph,
    known: Somewhere,
    asked: dict[Node, int],
    within: dict[Node, set[Node]],
    names: dict[int, Name],
) -> dict[Node, frozenset[Way]]:
    """By input with a gradient that it does not always have: the ways in which one comes to it.

    Args:
        captured: the graph.
        known: of it.
        asked: by branch, the number of what it asks.
        within: by op of a body, the branches around it.
        names: of what is asked, by number.

    Raises:
        BranchError: there are too many, or they differ between results, or lead through other ops.
    """
    nodes = list(captured.module.graph.nodes)
    differentiated = set(captured.differentiable)
    sources = GradientEdges(captured.values).sources(nodes, differentiated)
    outputs = [n for n in nodes[-1].all_input_nodes if n in differentiated]
    given = [n for n in captured.differentiable if n.op == "placeholder"]
    found = [_ways_from(output, nodes, sources, asked) for output in outputs]
    for node in given:
        if len({own[node] for own in found if node in own}) > 1:
            raise BranchError(f"{ASKS} what has a gradient, which differs between what the model returns")
    ways: dict[Node, frozenset[Way]] = {}
    for of_output in found:
        for node, more in of_output.items():
            ways[node] = _shortest(ways.get(node, frozenset()) | more)
    alone = lambda ways: {names[number] for way in ways if len(way) == 1 for number in way}  # noqa: E731
    for of_output in found:
        of_inputs = set().union(*(of_output[n] for n in given if n in of_output))
        if not (of_inputs & ALWAYS) and not is_certain(known, alone(of_inputs)):
            raise BranchError(f"{ASKS} what the model returns has a gradient")
    around = {n: frozenset(asked[b] for b in own) for n, own in within.items()}
    conditional = {
        n: alone(own) if n not in around else set[Name]()
        for n, own in ways.items()
        if not any(way <= around.get(n, frozenset()) for way in own)  # it has a gradient where it is run
    }
    check_conditional(known, conditional, next(iter(asked)))
    return {n: ways[n] for n in given if ways.get(n, ALWAYS) != ALWAYS}


def _ways_from(
    output: Node, nodes: list[Node], sources: dict[Node, list[Node]], asked: dict[Node, int]
) -> dict[Node, frozenset[Way]]:
    """The ways in which a gradient of a result comes to each value."""
    ways = {output: ALWAYS}
    for node in reversed(nodes[:-1]):
        own = ways.get(node)
        for source in sources.get(node, ()) if own else ():
            assert own is not None
            ways[source] = _shortest(ways.get(source, frozenset()) | _through(node, source, own, asked))
    return ways


def _through(node: Node, source: Node, ways: frozenset[Way], asked: dict[Node, int]) -> frozenset[Way]:
    number = asked.get(node)
    if number is None or source is node.args[2]:
        return ways
    return frozenset(way | {number} for way in ways)


def _shortest(ways: frozenset[Way]) -> frozenset[Way]:
    if frozenset() in ways:
        return ALWAYS
    if len(ways) > MOST_WAYS:
        raise BranchError("its code asks the values of tensors too often to know what has a gradient")
    return frozenset(w for w in ways if not any(other < w for other in ways))


# ---- the graph


def _read_without_copy(branch: Node) -> None:
    """What was there before is read by the body itself: the copy that it was free to change is not needed."""
    skipped = branch.args[2]
    assert isinstance(skipped, Node)
    for user in list(skipped.users):
        plain = user.kwargs in ({}, {"memory_format": torch.preserve_format})
        if user.target is aten.clone.default and plain and _alike(user, skipped):
            user.replace_all_uses_with(skipped)


def _return_answers(captured: CapturedGraph, masks: list[Node]) -> None:
    """Return whether a mask has a true entry, for each of some masks."""
    graph = captured.module.graph
    output = graph.output_node()
    for mask in masks:
        rows = _any_of_each_row(mask)
        with graph.inserting_before(output):
            captured.asked.append(_any(rows))
    output.args = ([*output.args[0], *captured.asked],)  # type: ignore[misc]


def _any_of_each_row(mask: Node) -> Node:
    """A mask without the dims that are always as long: less is stored of it until the end of the forward."""
    for dim, size in reversed(list(enumerate(tensors_of(mask)[0].shape))):
        if isinstance(size, int) and size > 1:
            with mask.graph.inserting_after(mask):
                mask = _any(mask, dim)
    return mask


def _any(mask: Node, *dim: int) -> Node:
    op = aten.any.dim if dim else aten.any.default
    node = mask.graph.call_function(op, (mask, *dim))
    value = tensors_of(mask)[0]
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = op(value, *dim)
    return node


def _erase(node: Node) -> None:
    """Remove a node that nobody reads, and what only it read of numbers."""
    if node.users or node.op != "call_function":
        return
    read = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in read:
        _erase(operand)
