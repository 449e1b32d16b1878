"""What is known of the rows of each buffer between two instructions of a procedure."""

from __future__ import annotations

from enum import Enum

from .faults import Fault
from .instructions import Buffer, BufferKind, Chunks, Instruction
from .procedure import Procedure
from .signature import KEPT, Signature


class Rows(Enum):
    """What the rows of a buffer hold."""

    ANYTHING = "anything"
    ZERO = "zeros"
    COUNTED = "values where they count in the loss, anything elsewhere"
    COMPLETE = "values"


class BufferStates:
    """What is known between two instructions.

    Attributes:
        signature: what the programs of the segment take and make.
        made_by: what has last had to do with a buffer.
        rows: of the buffers that are held.
        zeroed: buffers whose rows are zero where they do not lie on another one.
        lies_on: buffers that lie where another one did.
        results: of the chunk's program, not written yet.
        loop: that is followed.
        written: what this loop has written, so far.
        added, finished: sums that were added to, and of which all rows were differentiated.
        kept: chunks have kept something.
        read: buffers that a program has read.
        scaled, rounded: what was.
        gathered, received, sent: states of which rows of other devices came, or were sent.
        summed: state gradients to which other devices have added.
    """

    def __init__(self, procedure: Procedure, signature: Signature) -> None:
        self.procedure, self.signature = procedure, signature
        self.made_by: dict[Buffer, Instruction] = {}
        self.zeroed: set[Buffer] = set()
        self.rows = dict.fromkeys((*procedure.parameters, *procedure.passing), Rows.COMPLETE)
        self.lies_on: dict[Buffer, Buffer] = {}
        self.results: set[Buffer] = set()
        self.loop: Chunks | None = None
        self.written: set[Buffer] = set()
        self.added: set[Buffer] = set()
        self.finished: set[Buffer] = set()
        self.read: set[Buffer] = set()
        self.scaled: set[Buffer] = set()
        self.rounded: set[Buffer] = set()
        self.gathered: set[Buffer] = set()
        self.received: set[Buffer] = set()
        self.sent: set[Buffer] = set()
        self.summed: set[Buffer] = set()
        self.kept = KEPT in self.rows

    def need(self, buffer: Buffer) -> Rows:
        """What its rows hold; it must be held.

        Raises:
            Fault: it is not held.
        """
        if buffer not in self.rows:
            raise Fault(f"{buffer.name} is not held")
        return self.rows[buffer]

    def complete(self, buffer: Buffer) -> None:
        """Its rows hold all of their values.

        Raises:
            Fault: they do not.
        """
        if self.need(buffer) is not Rows.COMPLETE:
            raise Fault(f"the rows of {buffer.name} hold {self.rows[buffer].value}, not all of its values")

    def used(self) -> None:
        """Nothing is left of what a program has returned.

        Raises:
            Fault: something is.
        """
        if self.results:
            raise Fault(f"{min(b.name for b in self.results)} is made and not used")

    def unwritten(self, buffer: Buffer) -> None:
        """The chunk's rows were not written before.

        Raises:
            Fault: they were.
        """
        if self.need(buffer) is Rows.COMPLETE or buffer in self.written:
            raise Fault(f"rows of {buffer.name} are written twice")

    def hold(self, buffer: Buffer, rows: Rows) -> None:
        """From here on it is held, outside of loops.

        Raises:
            Fault: it is within one, or the buffer is held.
        """
        if self.loop is not None:
            raise Fault("memory for all chunks is allocated in each of them")
        if buffer in self.rows:
            raise Fault(f"{buffer.name} is held already")
        self.rows[buffer] = rows

    def end(self) -> None:
        """What is handed over is finished, and nothing else is left.

        Raises:
            Fault: something is not, or is left.
        """
        for buffer in self.procedure.results:
            try:
                self._handed_over(buffer)
            except Fault as fault:
                raise Fault(str(fault), self._seen_at(buffer)) from None
        if self.received != self.sent:
            lost = min(self.received ^ self.sent, key=lambda b: b.name)
            raise Fault(f"{lost.name} is received and not sent on", self._seen_at(lost))
        procedure = self.procedure
        mine = self.rows.keys() - {*procedure.parameters, *procedure.results, *procedure.passing}
        if mine:
            left = min(mine, key=lambda b: b.name)
            raise Fault(f"{left.name} is left allocated", self._seen_at(left))

    def _seen_at(self, buffer: Buffer) -> Instruction | None:
        """What has last had to do with a buffer; if nothing had, the last instruction."""
        body = self.procedure.body
        return self.made_by.get(buffer, body[-1] if body else None)

    def _handed_over(self, buffer: Buffer) -> None:
        if buffer == KEPT:
            if not self.kept:
                raise Fault("nothing was kept")
            return
        self.complete(buffer)
        scaling, loss = self.procedure.name == "scaling", self.procedure.name == "loss"
        if scaling and buffer not in self.scaled:
            raise Fault(f"{buffer.name} is not multiplied by the gradient of the loss")
        if buffer.kind is BufferKind.SUM and not loss and buffer not in self.rounded:
            raise Fault(f"{buffer.name} is handed over as a sum that is not rounded")
