"""The schedule of a compiled graph, for people to read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from .options import Options
from .passes.capture import source_line
from .passes.chunk import find_states
from .passes.ir import Facts, Reach, Segment
from .passes.segment import row_bytes

READS = {
    Reach.CONST: "nothing",
    Reach.ROW: "its own row",
    Reach.WINDOW: "a window of {window} rows",
    Reach.CAUSAL: "all rows up to its own",
    Reach.FULL: "all rows",
}


@dataclass
class Schedule:
    """What the compiler decided for one captured graph.

    Attributes:
        facts: what was proved; `segments` are in order of execution.
        options: the options it was compiled with.
        seq_len: tokens of a sequence, where the schedule was made for a certain length; else None.
        sweeps: over the loss head in a training step: 1 if its gradient comes with the loss, 2 if the loss
            must be known first, 0 if there is no loss.
        number: schedules are counted in the order in which they are made.
    """

    facts: Facts = field(repr=False)
    options: Options
    seq_len: int | None = None
    sweeps: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    _code: str | None = field(default=None, repr=False, compare=False)

    @property
    def segments(self) -> list[Segment]:
        return self.facts.segments

    # ---- bytes

    def stored_bytes_per_row(self) -> int:
        """Bytes that the forward keeps for the backward, a row of the batch: the inputs of all segments."""
        stored = dict.fromkeys(n for s in self.segments for n in s.rows)
        return sum(int(row_bytes(self.facts, n)) for n in stored)

    def state_bytes_per_row(self, segment: Segment) -> int:
        """Bytes of the carried state of a segment, a row of the batch (keys and values, say).

        They are held while the segment runs; in backward their gradients as well.
        """
        if not segment.chunked or not segment.mixings:
            return 0
        return sum(int(row_bytes(self.facts, s.node)) for s in find_states(self.facts, segment))

    def chunks(self, segment: Segment) -> int | None:
        """How many chunks a segment runs in, if the sequence length is known."""
        if self.seq_len is None or not segment.chunked or segment.kind == "whole":
            return None if self.seq_len is None else 1
        rows = self.options.rows if segment.mixings else self.options.loss_chunk
        return -(-(self.seq_len - segment.removed) // rows)

    def for_length(self, seq_len: int | None = None) -> Schedule:
        """The same schedule for a sequence length: by default that of the call that was captured."""
        known = self.facts.values.get(self.facts.sequence) if self.facts.sequence is not None else None
        return dataclasses.replace(self, seq_len=seq_len or self.seq_len or known, _code=None)

    # ---- the program

    def code(self) -> str:
        """The compiled step as one Python module that runs, forward and backward, and needs only PyTorch.

        Each op has a line with its shape, under the line of the model that it comes from. `exec` the text and
        call `step(inputs..., parameters)`, where `parameters` is a dict by dotted name; it returns the loss
        and a dict of gradients. It is printed for `seq_len`, or where that is None for the length of the call
        that was captured. It serves other lengths whose chunks are alike, and raises for those whose chunks
        are not. The programs are traced at the first call, which takes some seconds.

        Raises:
            CompileError: a program cannot be traced.
            ValueError: the graph has nothing that is streamed.
        """
        from .code import generate

        if not self.segments:
            raise ValueError("the graph runs unstreamed: there is no program to print")
        if self._code is None:
            self._code = generate(self.facts, self.options, self.seq_len)
        return self._code

    def to_dot(self) -> str:
        """The segment graph as Graphviz text: `dot -Tsvg` draws it.

        Segments are boxes, dashed with their reason where they run whole; edges are what flows between them,
        with bytes a row of the batch; a carried state is an edge of a segment to itself.
        """
        from .dot import dot

        return dot(self)

    # ---- text

    def __str__(self) -> str:
        lines = [
            self._title(),
            f"  {'segment':<9}{'kind':<9}{'ops':>4}  {'chunks':>6}  {'stores':>9}  {'state':>9}  reads",
        ]
        lines += [f"  {line}" for group in self._folded() for line in self._lines(group)]
        lines.append(
            f"  stored for the backward: {_size(self.stored_bytes_per_row())} a row of the batch"
            + self._total()
        )
        lines += self._loss()
        return "\n".join(lines)

    def _title(self) -> str:
        length = "" if self.seq_len is None else f" for {self.seq_len} tokens"
        return (
            f"Schedule of {len(self.segments)} segments{length}, chunk {self.options.chunk}, "
            f"loss chunk {self.options.loss_chunk}"
        )

    def _folded(self) -> Iterator[list[Segment]]:
        """Runs of identical segments."""
        for _, run in itertools.groupby(self.segments, key=lambda s: s.signature or str(s.index)):
            yield list(run)

    def _lines(self, group: list[Segment]) -> Iterator[str]:
        segment, last = group[0], group[-1]
        numbers = f"{segment.index}" if last is segment else f"{segment.index}-{last.index}"
        stores = sum(int(row_bytes(self.facts, n)) for n in segment.rows)
        state, chunks = self.state_bytes_per_row(segment), self.chunks(segment)
        reads = (
            READS[segment.reach].format(window=segment.window or "some") if segment.chunked else "all rows"
        )
        yield (
            f"{numbers:<9}{segment.kind:<9}{len(segment.nodes):>4}  {chunks or '':>6}  {_size(stores):>9}  "
            f"{_size(state):>9}  {reads}{self._masks(segment)}"
        )
        if not segment.chunked:
            where = f" ({source_line(segment.refused)})" if segment.refused is not None else ""
            yield f"{'':<9}runs whole: {segment.reason}{where}"

    def _masks(self, segment: Segment) -> str:
        masks = dict.fromkeys(m.mask for m in segment.mixings if m.mask is not None)
        described = "; ".join(str(self.facts.masks[m]) for m in masks if m in self.facts.masks)
        return f" ({described})" if described else ""

    def _total(self) -> str:
        if self.seq_len is None:
            return ""
        return f", {_size(self.stored_bytes_per_row() * self.seq_len)} in all"

    def _loss(self) -> Iterator[str]:
        if self.sweeps:
            known = "known before the sweep" if self.sweeps == 1 else "known only after a first sweep"
            yield f"  {self.sweeps} sweep(s) over the loss head: its coefficients are {known}"
        for position, node in self.facts.lazy.items():
            yield f"  output {position} ({node.name}) is {self.options.logits}: nothing stores it"


def _size(count: float) -> str:
    """Bytes for people: "512 B", "12.0 KiB"; "-" for none."""
    if not count:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
