"""The schedule of a compiled graph, for people to read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .options import Options
from .passes.capture import source_line
from .passes.ir import Facts, Segment


@dataclass
class Schedule:
    """What the compiler decided for one captured graph.

    Attributes:
        facts: what was proved; `segments` are in order of execution.
        options: the options it was compiled with.
        sweeps: over the loss head in a training step: 1 if its gradient comes with the loss, 2 if the loss
            must be known first, 0 if there is no loss.
        number: schedules are counted in the order in which they are made.
    """

    facts: Facts = field(repr=False)
    options: Options
    sweeps: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def segments(self) -> list[Segment]:
        return self.facts.segments

    def __str__(self) -> str:
        head = f"chunk {self.options.chunk}, loss chunk {self.options.loss_chunk}"
        lines = [f"Schedule of {len(self.segments)} segments, {head}"]
        previous: Segment | None = None
        for segment in self.segments:
            if previous is not None and segment.signature == previous.signature:
                lines.append(f"  {segment.index:>3}  the same")
                continue
            lines.append("  " + self._line(segment))
            previous = segment
        if self.sweeps:
            known = "known before the sweep" if self.sweeps == 1 else "known only after a first sweep"
            lines.append(f"  {self.sweeps} sweep(s) over the loss head: its coefficients are {known}")
        for position, node in self.facts.lazy.items():
            lines.append(f"  output {position} ({node.name}) is {self.options.logits}: nothing stores it")
        return "\n".join(lines)

    def _line(self, segment: Segment) -> str:
        stored = ", ".join(n.name for n in segment.rows) or "nothing"
        text = f"{segment.index:>3}  {segment.kind:<6} {len(segment.nodes):>3} ops, stores {stored}"
        if not segment.chunked:
            where = source_line(segment.refused) if segment.refused is not None else ""
            return f"{text}; WHOLE: {segment.reason} ({where})"
        reach = segment.reach.name + (f" {segment.window}" if segment.window is not None else "")
        masks = {m.mask for m in segment.mixings if m.mask is not None}
        described = "; ".join(str(self.facts.masks[m]) for m in masks if m in self.facts.masks)
        return f"{text}; rows read {reach}" + (f" ({described})" if described else "")
