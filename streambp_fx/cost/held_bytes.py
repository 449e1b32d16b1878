"""What is held at a point of the step, and what the sizes of a step are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from ..passes.cost.work import Work
from ..passes.s6_schedule.collectives import Collective
from ..passes.s6_schedule.program.values import CHUNK as CHUNK
from ..passes.s6_schedule.program.values import LOSS_CHUNK as LOSS_CHUNK

STORED, STATE, STATE_GRADIENTS = "stored inputs", "state", "state gradients"
BODIES, LOSS, PARAMETERS = "chunk bodies", "loss", "parameter gradients"
KEPT = "saved values"
GATHERED, SUMMED = "gathered parameters", "gradients being summed"
HIDDEN, DATA, OUTPUTS = "hidden-state gradients", "positions and masks", "outputs"
#: What memory is held for, in the order of pictures and tables.
CAUSES = (
    *(STORED, KEPT, DATA, HIDDEN, STATE, STATE_GRADIENTS, PARAMETERS, BODIES, LOSS, OUTPUTS),
    *(GATHERED, SUMMED),
)

TOKENS, BATCH, ROWS, PREFIX, LOW, TOTAL = (
    sympy.Symbol(n, integer=True, positive=True) for n in ("T", "B", "rows", "prefix", "low", "total")
)


@dataclass(frozen=True)
class Moment:
    """One point of the step.

    Attributes:
        phase: "forward" or "backward".
        segment: index of the segment that runs.
        chunk: which of its chunks, from 0, or None between chunks.
        program: kind of the program that runs ("forward", "states", "joint", "loss", "unchunked"), or None;
            of a collective, its kind.
        bytes: what is held, by cause, in bytes: the largest while the program runs.
        work: what the program computes and moves; where sizes are symbols, its operations alone.
        collective: what several devices do together at this point, beside the segment.
    """

    phase: str
    segment: int
    chunk: int | None
    program: str | None
    bytes: Mapping[str, Any]
    work: Work = field(default_factory=Work)
    collective: Collective | None = None

    @property
    def flops(self) -> Any:
        """Floating-point operations of the program."""
        return self.work.flops

    @property
    def total(self) -> Any:
        """All bytes that are held, of all causes."""
        return sum(self.bytes.values())


@dataclass
class Sizes:
    """The sizes of a step as numbers, or as symbols.

    Attributes:
        tokens: sequence length.
        chunk, loss_chunk: rows of a chunk.
        others: values of other size symbols (the batch size) by symbol.
    """

    tokens: Any
    chunk: Any
    loss_chunk: Any
    others: Mapping[sympy.Symbol, Any] = field(default_factory=dict)

    @property
    def symbolic(self) -> bool:
        """True if the sequence length is a symbol."""
        return isinstance(self.tokens, sympy.Expr)


class Ledger:
    """What is held now, by key and cause."""

    def __init__(self) -> None:
        self.held: dict[Any, tuple[str, Any]] = {}

    def hold(self, key: Any, cause: str, size: Any) -> None:
        """Note that something is held from now on: `size` bytes for a cause, found again by its key."""
        self.held[key] = (cause, size)

    def drop(self, *keys: Any) -> None:
        """Note that what has these keys is no longer held; unknown keys do no harm."""
        for key in keys:
            self.held.pop(key, None)

    def bytes(self, *more: tuple[str, Any]) -> dict[str, Any]:
        """Bytes by cause, with `more` of them for the moment."""
        found: dict[str, Any] = {}
        for cause, size in (*self.held.values(), *more):
            found[cause] = found.get(cause, 0) + size
        return found
