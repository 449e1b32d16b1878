"""A graph with branches on data, run as eager runs them: no body of a branch that is not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from ...passes.graph.ops.branch import BRANCH


def as_asked(module: GraphModule) -> Callable[..., Any]:
    """What runs a Dynamo graph so; the graph itself if it has no branches on data.

    Args:
        module: the graph. Nothing is proved of the bodies of its branches: they may fail, or draw numbers.
    """
    nodes = list(module.graph.nodes)
    place = {n: k for k, n in enumerate(nodes)}
    bodies: dict[Node, set[Node]] = {}
    read_behind = set[Node]()
    for branch in (n for n in nodes if n.target is BRANCH):
        predicate = branch.args[0]
        body = nodes[place[predicate] + 1 : place[branch]]  # type: ignore[index]
        for node in reversed(body):  # a number that is also read behind it was first read here, see Dynamo
            if any(place[reader] > place[branch] or reader in read_behind for reader in node.users):
                read_behind.add(node)
        own = (n for n in body if n not in read_behind)
        bodies.setdefault(predicate, set()).update(own, [branch])  # type: ignore[arg-type]
    return _AsAsked(module, bodies).run if bodies else module


class _AsAsked(Interpreter):
    """Runs a graph op by op, without the bodies of branches that are not taken.

    Args:
        module: the graph.
        bodies: by what is asked, the ops of the body and what the variables become behind it.
    """

    def __init__(self, module: GraphModule, bodies: dict[Node, set[Node]]) -> None:
        super().__init__(module)
        self.bodies, self.skipped = bodies, set[Node]()

    def run(self, *inputs: Any) -> Any:
        """The results of the graph.

        Args:
            inputs: those of the graph.
        """
        self.skipped = set()
        return super().run(*inputs)

    def run_node(self, n: Node) -> Any:
        """The value of a node; of a branch that is not taken, what was there before."""
        if n.target is BRANCH:
            return self.env[n.args[2 if n in self.skipped else 1]]  # type: ignore[index]
        if n in self.skipped:
            return None
        found = super().run_node(n)
        if n in self.bodies and not found:
            self.skipped |= self.bodies[n]
        return found
