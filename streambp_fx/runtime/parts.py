"""What an executor is made of: runners of segments, and parts of the graph that run in ordinary PyTorch."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..options import Options
from ..passes.extract import Subgraph
from ..passes.footprints import mask_facts
from ..passes.ir import Facts, Kind, Mask, Segment, shape_of
from ..passes.objective import is_linear
from ..passes.programs import SegmentPrograms
from .streamed import SegmentRunner

# By signature of the segment, body, what is saved, and the dtype of sums.
Programs = dict[tuple[str, str, str, str], SegmentPrograms]


def reads(segment: Segment, runner: Any) -> list[Node]:
    """What a segment is given."""
    if isinstance(runner, Subgraph):
        return runner.inputs
    return [*segment.rows, *segment.constants, *segment.whole]


def attribute(facts: Facts, node: Node) -> Any:
    """The value of a `get_attr` node."""
    value: Any = facts.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def whole_form(facts: Facts, segment: Segment) -> Subgraph:
    """A segment as a module that runs it whole."""
    return Subgraph(facts, segment.outputs, {*segment.rows, *segment.constants, *segment.whole})


def runners_of(facts: Facts, options: Options, shared: Programs) -> list[Any]:
    """A runner for each segment; identical segments share their programs."""
    runners: list[Any] = []
    for segment in facts.segments:
        if not segment.chunked or segment.kind == "whole":
            runners.append(whole_form(facts, segment))
            continue
        save = options.save if segment.mixings else "inputs"
        key = (segment.signature, options.body, save, options.accumulate)
        programs = shared.get(key)
        if programs is None:
            programs = shared[key] = SegmentPrograms(facts, segment, *key[1:])
        runners.append(SegmentRunner(facts, segment, programs))
    return runners


def whole_inputs(facts: Facts) -> set[Node]:
    """Values that are computed once, before the segments."""
    return {n for n, k in facts.kinds.items() if k is Kind.WHOLE}


def lazy_parts(facts: Facts, known: set[Node]) -> dict[int, Subgraph]:
    """For each wide output, how it is made of what the segments store."""
    parts = {k: Subgraph(facts, [n], known) for k, n in facts.lazy.items()}
    assert not any(p.random for p in parts.values())
    return parts


def whole_targets(facts: Facts, read: set[Node], tested: dict[Mask, bool]) -> list[Node]:
    """Whole values that segments, the epilogue, lazy outputs or the masks' run-time tests read."""
    wanted = {n for s in facts.segments for n in s.whole}
    wanted |= {n for n in read if facts.kinds[n] is Kind.WHOLE}
    wanted |= {n for m in tested for n in mask_facts(facts, m).linear.values()}
    pending = [n for m in tested for n in m.nodes]
    while pending:
        node = pending.pop()
        for operand in node.all_input_nodes:
            if facts.kinds[operand] is Kind.WHOLE:
                wanted.add(operand)
            elif facts.kinds[operand] is Kind.SQUARE:
                pending.append(operand)
    return [n for n in facts.nodes if n in wanted and n.op == "call_function"]


def one_sweep(facts: Facts, runners: list[Any], tail: Subgraph) -> int | None:
    """Position of the scalar among the epilogue's outputs if loss and gradient take one sweep."""
    if not facts.segments or not isinstance(runners[-1], SegmentRunner):
        return None
    segment, runner = facts.segments[-1], runners[-1]
    wanted = [k for k, n in enumerate(tail.outputs) if n in facts.needs_grad]
    single = len(wanted) == 1 and len(segment.outputs) == 1 and runner.needs_grad
    if not single or runner.programs.states or shape_of(tail.outputs[wanted[0]]) != ():
        return None
    if segment.outputs[0] in facts.outputs:
        return None  # somebody else may have a gradient for the rows
    earlier = {n for s in facts.segments[:-1] for n in s.outputs}
    if any(n in earlier or n in facts.differentiable for n in tail.inputs):
        return None
    return wanted[0] if is_linear(facts, segment.outputs, tail.outputs[wanted[0]]) else None
