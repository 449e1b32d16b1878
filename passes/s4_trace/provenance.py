"""Which op of the model each op of a traced program comes from: forward and, by way of autograd, backward.

A program is traced by evaluating the captured graph's nodes one by one. What the trace records meanwhile is
marked with the node (`meta["origin"]`, its name) and with the node's source line (`meta["stack_trace"]`);
what autograd's nodes record later is marked by hooks on them, with `meta["backward"]` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode


class Marks:
    """What the trace has recorded since the last change of origin is marked with that origin."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.current: tuple[Node, bool] | None = None
        self.last = graph._root._prev

    def switch(self, origin: tuple[Node, bool] | None) -> None:
        """Mark what was recorded since the last call with the origin of then; `origin` holds from now on."""
        end = self.graph._root._prev
        while self.last is not end:
            self.last = self.last._next
            if self.current is not None:
                _mark(self.last, *self.current)
        self.current = origin


class Origins:
    """Marks of one trace. Outside a trace it does nothing.

    Hooks of autograd's nodes refer to the marks and not to `seen`, which refers to those nodes: the collector
    does not see through a node, so the cycle would keep every traced graph for good.
    """

    def __init__(self) -> None:
        mode = get_proxy_mode()
        self.marks = None if mode is None else Marks(mode.tracer.graph)
        self.seen: set[Any] = set()

    @contextmanager
    def of(self, node: Node) -> Iterator[None]:
        """Within: what is recorded comes from `node`."""
        if self.marks is None:
            yield
            return
        before = self.marks.current
        self.marks.switch((node, False))
        yield
        self.marks.switch(before)

    def follow(self, value: Any, node: Node) -> None:
        """What differentiates `value`, as far as no earlier node has claimed it, comes from `node`."""
        marks = self.marks
        if marks is None:
            return
        leaves = [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
        pending = [v.grad_fn for v in leaves]
        while pending:
            function = pending.pop()
            if function is None or function in self.seen:
                continue
            self.seen.add(function)
            function.register_prehook(lambda gradients: marks.switch((node, True)))
            pending.extend(f for f, _ in function.next_functions)

    def finish(self) -> None:
        """Mark what was recorded last."""
        if self.marks is not None:
            self.marks.switch(None)


def _mark(recorded: Node, node: Node, backward: bool) -> None:
    recorded.meta["origin"] = node.name
    if backward:
        recorded.meta["backward"] = True
    trace = node.meta.get("stack_trace")
    if trace:
        recorded.meta["stack_trace"] = trace
