"""What a step is made of: the programs of its segments, and the parts that run in ordinary PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from ..graph.facts import Facts, Kind, Mask, Reach, Segment, shape_of, tensors_of
from ..graph.purity import is_random
from ..graph.subgraph import Subgraph
from ..s2_prove.footprints import mask_facts
from ..s2_prove.linear_loss import is_linear
from ..s3_cut.policy import Policy, looks_up
from ..s5_lower.programs import SegmentPrograms

# By signature of the segment, body, the dtype of sums, and pieces of a prefix.
Programs = dict[tuple[str, str, str, int], SegmentPrograms]
#: In how many pieces a prefix is differentiated where rows lie elsewhere, see NOTE [prefix in pieces].
PIECES = 4


@dataclass(frozen=True)
class Making:
    """How the parts are made.

    Attributes:
        body: what chunk programs run on: "eager" kernels or Inductor's.
        policy: what is kept for the backward.
        accumulate: dtype of sums over chunks, where the value is in half precision.
        lazy: outputs in `facts.lazy` are computed when they are read.
        exchange: how states come from other devices: "gather", "blocks" or "auto".
        shared: rows of a sequence lie on several devices.
    """

    body: str
    policy: Policy
    accumulate: str
    lazy: bool
    exchange: str = "auto"
    shared: bool = False


class StepParts:
    """The parts of a graph's step.

    Args:
        facts: facts of the graph after the segment pass.
        making: how they are made.
        shared: programs of the same graph, to be used again where they are the same.

    Attributes:
        segments: for each segment its chunk programs, or the subgraph that runs it unchunked.
        masks: those that are asked in each step, see `masks_to_test`.
        epilogue: what is made of the segments' outputs.
        predicates: what branches on data have asked, likewise.
        lazy: by position among the graph's results how a lazy output is made.
        whole: what is computed once, before the segments.
        one_sweep: position of the loss among the epilogue's outputs, if loss and gradient take one sweep.
    """

    def __init__(self, facts: Facts, making: Making, shared: Programs) -> None:
        self.facts, self.policy, self.exchange = facts, making.policy, making.exchange
        self.segments = _programs_of(facts, making, shared)
        self.masks = masks_to_test(facts)
        streamed = {n for s in facts.segments for n in s.outputs}
        wanted = [n for n in facts.results if isinstance(n, Node) and n not in streamed and tensors_of(n)]
        known = streamed | {n for n, k in facts.kinds.items() if k is Kind.WHOLE}
        asked = [n for n in dict.fromkeys(wanted) if n in facts.asked]
        self.epilogue = Subgraph(facts, [n for n in dict.fromkeys(wanted) if n not in facts.asked], known)
        self.predicates = Subgraph(facts, asked, known)
        self.lazy = _lazy_parts(facts, known) if making.lazy else {}
        read = {n for part in (self.epilogue, self.predicates, *self.lazy.values()) for n in part.inputs}
        self.whole = Subgraph(facts, _whole_targets(facts, read, self.masks), set())
        # of a head that runs by chunks with the layers the gradient comes with theirs
        sweeps_once = making.policy.order == "layers"
        self.one_sweep = one_sweep(facts, self.segments, self.epilogue) if sweeps_once else None
        self.random = any(is_random(n) for n in facts.nodes)
        self._unchunked_forms: dict[int, Subgraph] = {}
        on_cpu = all(v.device.type == "cpu" for n in facts.parameters for v in tensors_of(n))
        self.on_host = on_cpu and not facts.placeless

    @cached_property
    def runs_to_the_end(self) -> str | None:
        """Why a step must run all rows, also those that the loss does not read; None if it need not.

        Nothing but the loss may read what the segments make, as it is not made of all rows then. (Lazy
        outputs are completed when they are read.)
        """
        if self.one_sweep is None:
            return "the loss does not take one sweep"
        made = {n for s in self.facts.segments for n in s.outputs}
        if any(n in made for n in self.facts.results):
            return "a value by rows is an output"
        if any(n in made for n in self.predicates.inputs):
            return "a branch asks all rows"
        if self.facts.not_linear:
            return "a custom autograd function may not be linear backwards"
        streamed: set[Node] = set()
        for segment, own in zip(self.facts.segments, self.segments, strict=True):
            if not isinstance(own, Subgraph):
                streamed.update(segment.outputs)
            elif any(n in streamed for n in own.inputs):
                return f"segment {segment.index} runs unchunked"
        return None

    @cached_property
    def dependent_samples(self) -> str | None:
        """Why the samples are not known to be independent; None if they are."""
        pairs = zip(self.facts.segments, self.segments, strict=True)
        found = ((s.index, own.samples) for s, own in pairs if isinstance(own, SegmentPrograms))
        return next((f"segment {index}: {why}" for index, why in found if isinstance(why, str)), None)

    @property
    def samples_together(self) -> str | None:
        """Why all samples are run as far as the longest; None if each can end where it does."""
        return "the model draws random numbers" if self.random else self.dependent_samples

    @cached_property
    def held_groups(self) -> frozenset[int]:
        """Groups of parameters that are read between the segments, and so held as long as the step runs."""
        read = {n for part in (self.whole, self.epilogue, *self.lazy.values()) for n in part.inputs}
        groups = enumerate(self.facts.parameter_groups)
        return frozenset(k for k, group in groups if not read.isdisjoint(group))

    @cached_property
    def forward_only_groups(self) -> frozenset[int]:
        """Groups that the backward does without: what reads them is run once, by autograd, which reads no
        parameter again if it is a table that is looked up.
        """
        groups, segments = self.facts.parameter_groups, self.facts.segments
        by_chunks = [
            s for s, own in zip(segments, self.segments, strict=True) if not isinstance(own, Subgraph)
        ]
        again = {n for s in by_chunks for n in s.constants}
        honoured = (k for k in self.facts.not_again_groups if again.isdisjoint(groups[k]))
        return frozenset(honoured) - self.held_groups

    @property
    def runs_chunks_first(self) -> bool:
        """True if chunks go through several layers each. Not where parameters are gathered layer by layer."""
        return self.policy.order == "chunks" and not self.facts.parameter_groups

    @property
    def moves(self) -> bool:
        """True if what is kept leaves the device: the CPU's memory is host memory."""
        place = self.policy.offload
        return place == "disk" or (place == "host" and not self.on_host)

    @property
    def moves_rows(self) -> bool:
        """True if rows between layers leave the device as well, see NOTE [rows elsewhere]."""
        return self.moves and self.policy.offload_rows

    def unchunked_form(self, segment: Segment) -> Subgraph:
        """A segment as a module that runs it unchunked."""
        if segment.index not in self._unchunked_forms:
            self._unchunked_forms[segment.index] = _unchunked_form(self.facts, segment)
        return self._unchunked_forms[segment.index]


def _unchunked_form(facts: Facts, segment: Segment) -> Subgraph:
    return Subgraph(facts, segment.outputs, {*segment.rows, *segment.constants, *segment.whole})


def _programs_of(facts: Facts, making: Making, shared: Programs) -> list[SegmentPrograms | Subgraph]:
    """Identical segments share their programs."""
    found: list[SegmentPrograms | Subgraph] = []
    for segment in facts.segments:
        # unchunked it would take all rows, and their gradient
        by_rows = making.policy.order == "chunks" or making.policy.offload_rows or making.shared
        whole = segment.kind == "unchunked" and not (by_rows and looks_up(facts, segment))
        if not segment.chunked or whole:
            found.append(_unchunked_form(facts, segment))
            continue
        pieces = PIECES if making.policy.offload_rows or making.shared else 1
        key = (segment.signature, making.body, making.accumulate, pieces)
        if key not in shared:
            shared[key] = SegmentPrograms(facts, segment, *key[1:])
        found.append(shared[key])
    return found


def masks_to_test(facts: Facts) -> dict[Mask, bool]:
    """Masks of chunked segments; True if masked scores are a finite number and not minus infinity.

    NOTE [rows that see nothing]: a row whose every score is the same finite "minus infinity" attends evenly
    to the *whole* sequence, later rows included. Such a step is run with FULL reach.
    """
    found: dict[Mask, bool] = {}
    for segment in facts.segments:
        for mixing in segment.mixings:
            if not segment.chunked or mixing.mask is None or mixing.reach is Reach.FULL:
                continue
            found[mixing.mask] = found.get(mixing.mask, False) or mixing.may_read_all
    return found


def _lazy_parts(facts: Facts, known: set[Node]) -> dict[int, Subgraph]:
    """For each wide output, how it is made of what the segments store."""
    parts = {k: Subgraph(facts, [n], known) for k, n in facts.lazy.items()}
    assert not any(p.random for p in parts.values())
    return parts


def _whole_targets(facts: Facts, read: set[Node], tested: dict[Mask, bool]) -> list[Node]:
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


def one_sweep(facts: Facts, segments: list[SegmentPrograms | Subgraph], epilogue: Subgraph) -> int | None:
    """Position of the scalar among the epilogue's outputs if loss and gradient take one sweep."""
    if not facts.segments or not isinstance(segments[-1], SegmentPrograms):
        return None
    segment, programs = facts.segments[-1], segments[-1]
    if not facts.not_linear.isdisjoint(segment.nodes):
        return None  # the gradient for twice a cotangent need not be twice the gradient
    wanted = [k for k, n in enumerate(epilogue.outputs) if n in facts.needs_grad]
    single = len(wanted) == 1 and len(segment.outputs) == 1 and facts.trains(segment)
    if not single or programs.states or shape_of(epilogue.outputs[wanted[0]]) != ():
        return None
    if segment.outputs[0] in facts.outputs:
        return None  # somebody else may have a gradient for the rows
    earlier = {n for s in facts.segments[:-1] for n in s.outputs}
    if any(n in earlier or n in facts.differentiable for n in epilogue.inputs):
        return None
    return wanted[0] if is_linear(facts, segment.outputs, epilogue.outputs[wanted[0]]) else None
