"""What is known of the loops of the frame that Dynamo is compiling."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from ...passes.graph.sources import source_expression


@dataclass
class LoopRecord:
    """Of one frame, however often Dynamo begins anew.

    Attributes:
        unrolls_all: no loop is taken for a step.
        refused: code whose loops are unrolled.
        taken: code with loops that were taken for steps and that has yet to be compared with them.
        in_body: within how many bodies of scans the trace is.
        bodies: how many have been looked at.
        unrolled: file, line and reason of each loop that is unrolled.
        branches: by code, whether its branches on data are traced with the body taken; None: of no code.
        without: code that was made of such code.
        graph: what was traced last, its inputs and the expressions of these.
    """

    unrolls_all: bool = False
    refused: set[CodeType] = field(default_factory=set)
    taken: set[CodeType] = field(default_factory=set)
    in_body: int = 0
    bodies: int = 0
    unrolled: dict[str, None] = field(default_factory=dict)
    branches: dict[CodeType, bool] | None = field(default_factory=dict)
    without: set[CodeType] = field(default_factory=set)
    graph: tuple[GraphModule, Sequence[Any], list[str]] | None = None

    def refuse(self, code: CodeType, why: str) -> None:
        """From now on the loops of a function are unrolled, and it is noted why."""
        self.refused.add(code)
        self.taken.discard(code)
        self.unrolled[f"{code.co_filename}:{code.co_firstlineno}: {why}"] = None


_current: ContextVar[LoopRecord | None] = ContextVar("loops_of_a_frame", default=None)


@contextlib.contextmanager
def recorded(record: LoopRecord) -> Iterator[LoopRecord]:
    """Within: what happens to loops is noted in `record`."""
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def current_record() -> LoopRecord | None:
    """That of the frame which Dynamo is compiling for this backend; None if it compiles none."""
    return _current.get()


def unrolled_loops() -> list[str]:
    """Loops of the graph that is being traced which are no steps from row to row: file, line and reason."""
    record = _current.get()
    return [] if record is None else list(record.unrolled)


def note_graph(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Keep what was traced, to compare its loops.

    Args:
        module: the Dynamo graph; it may be changed afterwards.
        inputs: its inputs, real tensors.
    """
    record = _current.get()
    if record is not None and record.taken:
        copied = GraphModule(module, copy.deepcopy(module.graph))
        record.graph = copied, list(inputs), names_of_inputs(module)


def names_of_inputs(module: GraphModule) -> list[str]:
    """The expressions in which Dynamo found the inputs of a graph, which it forgets after compiling."""
    return [source_expression(n) for n in module.graph.nodes if n.op == "placeholder"]
