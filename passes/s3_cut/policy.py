"""policy: what is kept from the forward to the backward, and where it lies meanwhile.

By default a segment keeps its streamed inputs and nothing else. Three choices change that, each on its own:

    save     "attention" also keeps what attention has computed, its output and log-sum-exp. The backward
             then computes no attention again: the part of the recompute that grows with the square of the
             length.
    every    k: only every k-th segment keeps its inputs; those between are computed again, together, before
             their backward. Less memory, one forward more.
    offload  "host" or "disk": what is kept lies there between forward and backward; with `offload_rows` the
             rows between layers do all the time, see `s6_schedule.rows_elsewhere`.

A fourth one changes the order, and with it what is kept at all: `order="chunks"`,
see `s6_schedule.chunks_first`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..graph.facts import Facts, Kind, Segment
from ..rules.op_sets import ALIGNED, VIEW_ONLY
from ..step.saving import ATTENTION, Piece, Price, Saving, evenly, everywhere


@dataclass(frozen=True)
class Policy:
    """What is kept and where.

    Attributes:
        save: "inputs", or "attention" for attention outputs and log-sum-exps as well, or what is saved of
            each segment besides its inputs.
        every: only every k-th segment keeps its inputs.
        offload: "none", "host" or "disk".
        offload_rows: with `offload`: rows between layers lie there as well while layers run, and come to the
            device chunk by chunk.
        order: "layers" (all chunks go through a layer before the next layer begins), or "chunks" (a chunk
            goes through all layers before the next chunk begins).
    """

    save: str | Saving = "inputs"
    every: int = 1
    offload: str = "none"
    order: str = "layers"
    offload_rows: bool = False

    def saves(self, segment: Segment) -> tuple[Piece, ...]:
        """What is saved of which rows of a segment, besides its inputs."""
        if isinstance(self.save, Saving):
            return self.save.segments[segment.index]
        return everywhere(ATTENTION) if self.save == "attention" and segment.mixings else ()

    def __str__(self) -> str:
        what = "inputs and attention outputs" if self.save == "attention" else str(self.save)
        which = f" of every {ordinal(self.every)} segment" if self.every > 1 else ""
        where = {"none": "", "host": ", in host memory", "disk": ", on disk"}[self.offload]
        if self.order == "chunks":
            return "chunks first: store what later chunks read of each layer"
        return f"store {what}{which}{where}{', rows come by chunks' if self.offload_rows else ''}"


def as_checked(policy: Policy, facts: Facts) -> Policy:
    """The policy under which a short step runs all programs that steps under this one run.

    Of a few chunks each one saves something else: of segments that are alike, all that some of them saves.
    Steps that save the same of other rows are the same to a check.
    """
    if not isinstance(policy.save, Saving):
        return policy
    alike: dict[str, dict[Price | None, None]] = {}
    for segment in facts.segments:
        prices = (piece.price for piece in policy.saves(segment) or evenly([None]))
        alike.setdefault(segment.signature, {}).update(dict.fromkeys(prices))
    first = next((s for s in facts.segments if s.mixings), None)
    pieces, seen = [], Counter[str]()
    for segment in facts.segments:
        own = list(alike[segment.signature])
        turn = seen[segment.signature] % len(own)
        seen[segment.signature] += 1
        # what looks rows up runs with the first layer, if nothing of that is saved: see `groups`
        joins = segment is first and not policy.saves(segment)
        pieces.append(() if joins or own == [None] else evenly(own[turn:] + own[:turn]))
    return replace(policy, save=Saving(tuple(pieces)))


def candidates(policy: Policy, filled: bool = False, chunks_first: bool = False) -> list[Policy]:
    """What `policy="auto"` tries, from the least work to the least memory.

    Args:
        policy: its `offload` is where what is kept may go as well, and with `offload_rows` the rows between
            layers. A transfer beside the computation is cheaper than computing again, and dearer than none.
        filled: where inputs alone fit, the rest of the memory is filled up: what attention computes is among
            that, and is not tried on its own.
        chunks_first: the other order may be taken. Its work is little more than that of layers first.
    """
    places = dict.fromkeys(("none", policy.offload))
    saved = ("attention", "inputs")
    found = [Policy(save, 1, place) for place in places for save in saved]
    if policy.offload_rows:
        found += [Policy(save, 1, policy.offload, offload_rows=True) for save in saved]
    again = [Policy(save, every, place) for every in (2, 4, 8) for save in saved for place in places]
    return [*found[filled:], *([Policy(order="chunks")] if chunks_first else []), *again]


def ordinal(number: int) -> str:
    """2nd, 3rd, 11th, 21st."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def rows_from_outside(group: list[Segment]) -> list[Node]:
    """The streamed inputs of segments that run one after the other, without what they make for each other."""
    made = {n for s in group for n in s.outputs}
    return list(dict.fromkeys(n for s in group for n in s.rows if n not in made))


def groups(facts: Facts, policy: Policy) -> list[list[Segment]]:
    """The segments in order, those that keep their inputs together in one group.

    A group is a run of up to `every` neighbouring segments that read along the sequence. What looks rows up
    (an embedding) joins the segment after it: looking them up again costs next to nothing, and then it is the
    ids that are kept. Not so where that segment keeps its attention, which a group computes again.
    """
    found: list[list[Segment]] = []
    for segment in facts.segments:
        trains = found and facts.trains(segment)
        if trains and (_joins if segment.mixings else _is_rest_of)(facts, policy, found[-1], segment):
            found[-1].append(segment)
        else:
            found.append([segment])
    return found


def _joins(facts: Facts, policy: Policy, group: list[Segment], after: Segment) -> bool:
    """True if a group takes in the segment after it, which reads along the sequence."""
    layers = sum(bool(s.mixings) for s in group)
    if group[-1].mixings:
        return facts.trains(group[-1]) and layers < policy.every
    again = (not policy.saves(after) and not policy.offload_rows) or policy.every > 1
    return len(group) == 1 and again and looks_up(facts, group[0]) and _is_there_again(facts, group[0])


def _is_rest_of(facts: Facts, policy: Policy, group: list[Segment], after: Segment) -> bool:
    """True for rows that were cut off the segment before: what lies between the two is made again.

    Not where it lies elsewhere, and is not missed; nor where other parameters are gathered for the one than
    for the other, whose order would depend on what is saved.
    """
    again = not policy.offload_rows and not policy.saves(after) and facts.trains(group[-1])
    gathered = _gathered(facts, group[-1])
    return after.is_behind and again and (not gathered or gathered == _gathered(facts, after))


def _is_there_again(facts: Facts, segment: Segment) -> bool:
    """True if the parameters of a segment are there in the backward, and need not be gathered.

    Otherwise the order in which they are gathered would depend on what is saved, which each device may choose
    for itself.
    """
    return not _gathered(facts, segment)


def _gathered(facts: Facts, segment: Segment) -> set[int]:
    """Which groups of parameters are gathered for a segment."""
    groups = enumerate(facts.parameter_groups)
    return {k for k, group in groups if any(n in segment.constants for n in group)}


def looks_up(facts: Facts, segment: Segment) -> bool:
    """True for rows that come out of tables and pointwise ops, and are made of no other segment's rows."""
    cheap = {torch.ops.aten.embedding.default, *ALIGNED, *VIEW_ONLY}
    known = {Kind.STREAM, Kind.CONSTANT, Kind.REDUCED}
    computed = [n for n in segment.nodes if facts.kinds.get(n) in known]
    made = {n for s in facts.segments for n in s.outputs}
    return not made.intersection(segment.rows) and all(n.target in cheap for n in computed)
