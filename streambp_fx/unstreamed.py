"""What runs in the place of a graph that is not streamed, and the warnings that say so."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .dynamo.loops import unrolled_loops
from .dynamo.this_backend import goes_on_behind
from .errors import warn
from .passes.graph.facts import Facts, Segment
from .passes.graph.sources import source_line, source_name
from .passes.graph.symbols import Lengths
from .passes.rules.asking import op_name
from .passes.s1_capture.sequence_length import is_called, lengths_read
from .passes.s2_prove.axes import is_secondary
from .runtime.step_counts import StepCounts
from .schedule import Schedule

log = logging.getLogger(__name__)
CUT_AT_BUCKETS = (
    "Dynamo has cut the graph where a bucket of DistributedDataParallel is full, and hands over pieces that "
    "cannot be streamed. Write this before the first step: torch._dynamo.config.optimize_ddp = False. Or use "
    "streambp_fx.transform(model) in the place of torch.compile, which does so by itself."
)
HOST_IS_HERE = (
    'offload="host" does nothing for a model on the CPU, whose memory is host memory. '
    'offload="disk" writes what is kept to a file'
)
LAYERS_FIRST = (
    'order="chunks" changes nothing here, and layers go first: no segment hands rows to the next one and to '
    "nobody else, all read columns of one value, or parameters are gathered layer by layer"
)
PARTLY_LAYERS_FIRST = (
    'order="chunks" is followed in part: all chunks go through segment {segments} before the next one '
    "begins, as {why}"
)
SHARES_MEMORY = "an input that is changed in place shares memory with another"


@dataclasses.dataclass(frozen=True)
class Otherwise:
    """What runs in the place of a graph that is not streamed.

    Attributes:
        run: it, with the inputs of the graph.
        layers: how many layers it computes again one by one; 0: none. Then a graph is not streamed either in
            which more than one of them would be computed again at once.
    """

    run: Callable[..., Any]
    layers: int = 0

    def is_better(self, facts: Facts) -> Segment | None:
        """A segment that runs unchunked and is much longer than a layer, if there is one.

        Or the longest of all, if none is chunked and layers can be checkpointed.

        NOTE [longer than a layer]: in it nothing is known of where the rows are, so it is cut nowhere.
        """
        whole = [s for s in facts.segments if not s.chunked]
        longest = max(whole, key=lambda s: len(s.nodes), default=None)
        ops = sum(len(s.nodes) for s in facts.segments)
        if longest is None:
            return None
        none_chunked = self.layers > 0 and len(whole) == len(facts.segments)
        return longest if none_chunked or 2 * self.layers * len(longest.nodes) > 3 * ops else None


@dataclasses.dataclass
class Unstreamed:
    """What runs in the place of a graph that is not streamed, for all sizes.

    Attributes:
        run: it, with the inputs of the graph.
        why: it is not streamed.
        counts: what its steps are counted in.
        in_python: the graph itself would give something else than the code that it was captured of.
    """

    run: Callable[..., Any]
    why: str
    counts: StepCounts
    in_python: bool = False

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """True: the graph runs with any sizes."""
        return True

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            self.counts.note(self.why, inputs)
        return self.run(*inputs)


def unknown_names(module: GraphModule, seq_dim: Mapping[str, int] | None) -> str:
    """What is said if `seq_dim` names no input of a graph that reads along something; else ""."""
    if not seq_dim:
        return ""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    own = [n for n in placeholders if isinstance(n.meta.get("example_value"), torch.Tensor)]
    if not lengths_read(module) or any(is_called(n, name) for name in seq_dim for n in own):
        return ""
    given = (source_name(n) for n in own if not isinstance(n.meta["example_value"], torch.nn.Parameter))
    names = [name.split(".")[-1] for name in given if not name.startswith("self")]  # no buffers of a module
    return (
        f"seq_dim names {', '.join(map(repr, seq_dim))}, but the inputs of this graph are {', '.join(names)}"
    )


def explain_unstreamed(module: GraphModule, lengths: Lengths, unknown: str) -> str:
    """A warning if the graph reads along something longer than one, or along nothing and trains more than a
    table, or is the rest of one that has ended.

    Any other without attention is a line in the log: a function of a loss, say, that is compiled by itself.

    Args:
        module: the graph.
        lengths: why nothing of it is the sequence.
        unknown: see `unknown_names`.

    Returns:
        the reason: `unknown`, or that of `lengths` and the loops that may have fixed the length.
    """
    why = unknown or f"{lengths.reason}{_of_loops()}"
    behind, read = goes_on_behind(), lengths_read(module)
    if any(size > 1 for size in read) or (behind is None and not read and _trains(module)):
        warn(f"the graph runs unstreamed: {why}")
    elif behind is not None:
        warn(
            f"what comes behind the graph break at {behind} runs unstreamed, with all its activations, the "
            "logits among them: each graph is streamed by itself, and in this one no op reads along the "
            "sequence. With fullgraph=True a graph break is an error that says what it is due to"
        )
    else:
        log.info("the graph runs as it is: %s", why)
    return why


def _of_loops() -> str:
    """A sentence on the loops of the graph that is compiled, to go on with; nothing, if none is unrolled."""
    loops = "; ".join(unrolled_loops())
    return f". A loop that is unrolled fixes how often it runs, and there are some: {loops}" if loops else ""


def _trains(module: GraphModule) -> bool:
    """True if parameters are trained of which more is read than rows that are looked up."""
    values = ((n, n.meta.get("example_value")) for n in module.graph.nodes if n.op == "placeholder")
    trained = [n for n, v in values if isinstance(v, torch.nn.Parameter) and v.requires_grad]
    lookup = torch.nn.functional.embedding
    return torch.is_grad_enabled() and any(u.target is not lookup for n in trained for u in n.users)


def warn_if_layers_first(schedule: Schedule) -> None:
    """A warning if with chunks first there are segments that read along the sequence, and run alone."""
    together = schedule.segments_together
    if not together:
        warn(LAYERS_FIRST)
        return
    inside, apart = {s.index for loop in together for s in loop}, schedule.segments_apart
    trained = [s.index for s in schedule.facts.segments if s.mixings and schedule.facts.trains(s)]
    alone = [k for k in trained if k not in inside]
    if alone:
        behind = [n for n in trained if n - 1 in alone]  # or the one behind is cut off from it
        why = dict.fromkeys(apart[n] for n in (*alone, *behind) if n in apart)
        warn(PARTLY_LAYERS_FIRST.format(segments=", ".join(map(str, alone)), why=", and ".join(why)))


def warn_unchunked(facts: Facts) -> None:
    """One warning for all regions that run unchunked, with the op, its source line and the cost."""
    whole = [s for s in facts.segments if not s.chunked and s.refused is not None]
    causes = [s for s in whole if not is_secondary(s.reason or "")]
    lines = list(map(why_whole, causes or whole))
    if lines:
        unique = list(dict.fromkeys(lines))
        warn(
            f"{len(lines)} of {len(facts.segments)} segments run unchunked. Their gradients are exact, but "
            "their activations are held for the whole sequence while they are recomputed:\n  "
            + "\n  ".join(unique)
            + _of_loops()
        )


def why_whole(segment: Segment) -> str:
    """The op for which a segment runs unchunked, the reason, and the model's line."""
    refused = segment.refused
    if refused is None:
        return segment.reason or "nothing is known of its rows"
    return f"{op_name(refused.target)}: {segment.reason} ({source_line(refused)})"
