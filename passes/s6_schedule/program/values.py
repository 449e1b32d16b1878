"""Values of a training step: what is held between its instructions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy
from torch.fx import Node

from ...step.instructions import DEVICE as DEVICE
from ...step.row_chunks import ChunkSize

#: Who adds to a gradient besides segments.
EPILOGUE, CALLER = -1, -2
#: Rows of a chunk, of a layer and of a loss head.
CHUNK, LOSS_CHUNK = (sympy.Symbol(n, integer=True, positive=True) for n in ("chunk", "loss_chunk"))
ROWS_OF_CHUNK = {ChunkSize.LAYER: CHUNK, ChunkSize.LOSS: LOSS_CHUNK}


class ValueKind(Enum):
    """What a value of the step is; the value begins its name."""

    CAPTURED = ""  # a value of the captured graph
    KEPT = "kept"  # what the chunks of a segment keep for the backward, besides its inputs
    STATE = "state"  # what later chunks of a segment read of earlier ones, where it is kept for the backward
    COEFFICIENTS = "coefficients"  # the derivative of a linear loss in the rows of its head
    UNSCALED = "unit_grad"  # a gradient for a unit gradient of the loss
    GRADIENT = "grad"
    LAZY = "lazy"  # an output that is computed when somebody reads it


@dataclass(frozen=True)
class Value:
    """Something that is held between the instructions of a step.

    Attributes:
        node: the captured value that it is, or whose gradient it is; None for what is kept.
        segment: by whom it is kept; of a gradient to which several add, the one whose part it is (also
            `EPILOGUE` or `CALLER`). None: a captured value, or the whole gradient.
    """

    kind: ValueKind
    node: Node | None = None
    segment: int | None = None

    @property
    def name(self) -> str:
        """Readable, and another one for each value of a step."""
        parts = [self.kind.value, "" if self.node is None else self.node.name]
        if self.segment is not None:
            by = {EPILOGUE: "of_epilogue", CALLER: "of_caller"}.get(self.segment, str(self.segment))
            parts.append(by if self.node is None or self.kind is ValueKind.UNSCALED else f"part_{by}")
        return "_".join(p for p in parts if p)
