"""Parameters that a forward changes in place before it reads them: the changes run ahead of the step.

NOTE [changes of parameters]: some models keep a weight in bounds at the beginning of its forward
(`self.weight.data.clamp_(-c, c)`). Autograd does not see that, so no functional op has the same gradient:
what reads the weight afterwards has the gradient of the leaf. If nothing of the graph has read the weight
before, that is the step of a graph without the change, on the weight after it. Any other change of a
parameter is refused when the graph is captured.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..passes.graph.purity import is_random
from ..passes.graph.tracing import trace

OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}


@dataclass(frozen=True)
class ParameterChanges:
    """What is done to parameters ahead of a step.

    Attributes:
        module: does it; takes the parameters that it reads.
        positions: of those among the inputs of the graph.
    """

    module: GraphModule
    positions: tuple[int, ...]

    def run(self, inputs: Sequence[Any]) -> None:
        """Change the parameters among the inputs of the graph."""
        with torch.no_grad():
            self.module(*(inputs[k] for k in self.positions))


def without_changes(module: GraphModule) -> tuple[GraphModule, ParameterChanges | None]:
    """A Dynamo graph without its changes of parameters, and these; the graph itself if some cannot go."""
    inputs = module.graph.find_nodes(op="placeholder")
    parameters = {n for n in inputs if isinstance(_value(n), torch.nn.Parameter)}
    made = _made_of(module.graph, parameters)
    changes = [n for n in module.graph.nodes if n in made and _changes(n, parameters)]
    moved = _with_operands(changes, parameters)
    if not changes or not _come_first(module.graph, changes, moved):
        return module, None
    read = [n for n in inputs if any(u in moved for u in n.users)]
    before = GraphModule(module, _copied(module.graph, {*moved, *read}))
    if _draws(before, [_value(n) for n in read]):
        return module, None
    rest = GraphModule(module, _copied(module.graph, set(module.graph.nodes) - moved))
    rest.meta.update(module.meta)
    return rest, ParameterChanges(before, tuple(inputs.index(n) for n in read))


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _storage(node: Node) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _made_of(graph: Graph, parameters: set[Node]) -> set[Node]:
    """Values made of parameters alone, of which autograd knows nothing."""
    found: set[Node] = set()
    recorded = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            recorded = bool(node.args[0])
        elif node.op in ("call_function", "call_method") and node.all_input_nodes:
            value = _value(node)
            unseen = not recorded or not (isinstance(value, Tensor) and value.requires_grad)
            if unseen and all(n in found or n in parameters for n in node.all_input_nodes):
                found.add(node)
    return found


def _changes(node: Node, parameters: set[Node]) -> bool:
    """True for a change in place of a parameter, or of a view of one."""
    name = node.target if node.op == "call_method" else ""
    in_place = node.target in OPERATORS or (name.endswith("_") and not name.endswith("__"))
    return in_place and _storage(node.all_input_nodes[0]) in {_storage(p) for p in parameters}


def _with_operands(changes: list[Node], parameters: set[Node]) -> set[Node]:
    moved: set[Node] = set()
    pending = list(changes)
    while pending:
        node = pending.pop()
        if node not in moved and node not in parameters:
            moved.add(node)
            pending += node.all_input_nodes
    return moved


def _come_first(graph: Graph, changes: list[Node], moved: set[Node]) -> bool:
    """True if nothing that stays has read what is changed, or reads what was made for a change."""
    if any(user not in moved for n in moved for user in n.users):
        return False
    to_come = Counter(_storage(n.all_input_nodes[0]) for n in changes)
    for node in graph.nodes:
        if node in moved:
            to_come[_storage(node.all_input_nodes[0])] -= node in changes
        elif any(to_come[_storage(n)] for n in node.all_input_nodes):
            return False
    return True


def _copied(graph: Graph, kept: set[Node]) -> Graph:
    """The nodes of a graph that are kept; one without its output returns nothing."""
    made, table = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in kept:
            table[node] = made.node_copy(node, lambda n: table[n])
    if not any(n.op == "output" for n in made.nodes):
        made.output(())
    return made


def _draws(module: GraphModule, given: list[Tensor]) -> bool:
    """True if a module draws random numbers: an eager step would draw them in their turn."""
    mode = next(v.fake_mode for v in given)  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        traced = trace(module, *(torch.empty_like(v) for v in given), pre_dispatch=True)
    return any(is_random(n) for n in traced.graph.nodes if n.op == "call_function")
