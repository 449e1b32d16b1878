"""procedure: the instructions of a part of a segment's step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .instructions import Buffer, Chunks, Instruction, Run
from .signature import Signature


@dataclass(frozen=True)
class Procedure:
    """The instructions of a part of a segment's step.

    Attributes:
        name: "forward", "backward", "loss" (values and gradients in one sweep), "scaling" (what is left of
            the backward after a loss) or "again" (a forward of each chunk just before its backward).
        parameters: what is held when it begins.
        results: what it hands over, in order.
        several: it runs the rows of one of several devices.
        passing: where its loop runs together with those of other segments, buffers of which the rows of one
            chunk at a time are there, given by such a segment or handed to it.
        signature: what the programs of the segment take and make; the checker compares. None: not known yet.
    """

    name: str
    parameters: tuple[Buffer, ...]
    body: tuple[Instruction, ...]
    results: tuple[Buffer, ...]
    several: bool = False
    passing: tuple[Buffer, ...] = ()
    signature: Signature | None = field(default=None, compare=False, repr=False)

    def around_loop(self) -> tuple[tuple[Instruction, ...], Chunks, tuple[Instruction, ...]]:
        """Of a procedure with one loop over chunks: what is done before it, the loop, and what after it."""
        ((place, loop),) = ((k, i) for k, i in enumerate(self.body) if isinstance(i, Chunks))
        return self.body[:place], loop, self.body[place + 1 :]

    def runs(self) -> Iterator[tuple[Chunks, Run]]:
        """The programs that it calls, each with its loop, in order."""
        for loop in self.body:
            if isinstance(loop, Chunks):
                yield from ((loop, inner) for inner in loop.body if isinstance(inner, Run))
