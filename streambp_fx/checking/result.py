"""What a self-check has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ..runtime.step_kinds import StepKind

# In what is left out: it is of some kind of step.
OF_KINDS = "no short step is of that kind"


@dataclass(frozen=True)
class SelfCheck:
    """One run of a compiled graph on a short sequence, against the graph as it was captured.

    Attributes:
        status: "agrees", "differs" (the graph then runs unstreamed) or "unchecked".
        rows: tokens of the short sequence.
        samples: sequences of the short batch; None where the graph has no batch size.
        chunk: rows of a chunk of a layer; those of the loss head have no more than 8 either.
        difference: the largest relative difference in the L2 norm, of outputs and of gradients.
        reason: why it is unchecked, or what differs.
        segment: index of the first segment that differs, or None.
        op: the first op that differs, or None.
        line: the model's source line of that op, or None.
        left_out: what was not checked beside the rest.
        seconds: that it took.
        kind: of the short step; None if there was none.
        others: what was found of other kinds of steps, later: in the words of the kind, and the check.
    """

    status: str
    rows: int = 0
    samples: int | None = None
    chunk: int = 0
    difference: float = 0.0
    reason: str = ""
    segment: int | None = None
    op: str | None = None
    line: str | None = None
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    kind: StepKind | None = dataclasses.field(default=None, repr=False, compare=False)
    others: tuple[tuple[str, SelfCheck], ...] = ()

    @property
    def ok(self) -> bool:
        """False if something differs."""
        return self.status != "differs"

    def lines(self) -> Iterator[str]:
        """What the schedule and the log say."""
        if self.status == "unchecked":
            yield f"not checked against the uncompiled graph: {self.reason}"
            return
        found = f"agrees to {self.difference:.0e}" if self.ok else f"DIFFERS: {self.reason}"
        yield f"checked against the uncompiled graph: {self.rows} rows, chunk {self.chunk}: {found}"
        for words, other in self.others:
            yield from other._as_other(words)
        yield from (f"unchecked: {text}" for text in self.left_out)

    def _as_other(self, words: str) -> Iterator[str]:
        """What is said of another kind of step."""
        if self.status == "unchecked":
            yield f"unchecked: steps with {words}: {self.reason}"
        else:
            yield f"checked as well: steps with {words}: agrees to {self.difference:.0e}"
            yield from (f"unchecked: {text}" for text in self.left_out if OF_KINDS in text)

    def failure(self) -> str:
        """What a user is told if something differs: where, and how to report it."""
        where = [f"segment {self.segment}"] if self.segment is not None else []
        where += [self.op] if self.op is not None else []
        line = f" The line of the model is {self.line}." if self.line is not None else ""
        return (
            f"the self-check found the streamed step to be wrong, on {self.rows} rows, chunk {self.chunk}: "
            f"{', '.join(where) + ': ' if where else ''}{self.reason}.{line} Nothing was returned of it."
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())
