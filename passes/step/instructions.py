"""What the step of a segment is made of: buffers, and instructions that fill them chunk by chunk.

A procedure is a list of instructions. The runtime interprets it, the cost model counts what it holds, the
printer writes it as Python, and the checker proves that it is sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Node

from .row_chunks import ChunkSize
from .saving import ALL, Price, Share

#: Where something lies that is not sent away.
DEVICE = "device"


class BufferKind(Enum):
    """What a tensor is in the step of a segment; the value begins its name.

    The kinds down to SUM go into chunk programs, in this order.
    """

    ROWS = "x"  # a streamed input of the segment
    CONSTANT = "p"  # a parameter, or what is made of parameters
    WHOLE = "w"  # a value that is computed once and has no gradient
    STATE = "state"  # what later chunks read of the rows of earlier ones (keys and values)
    STATE_GRADIENT = "grad_state"  # its gradient, a sum over the chunks that read it
    COTANGENT = "grad"  # the gradient of an output
    KEPT = "saved"  # what each chunk's forward keeps for its backward, besides the inputs
    SUM = "grad_p"  # the gradient of a constant, a sum over chunks
    OUTPUT = "y"  # what the segment makes
    GRADIENT = "grad_x"  # the gradient of a streamed input


BY_ROWS = frozenset({BufferKind.ROWS, BufferKind.COTANGENT, BufferKind.OUTPUT, BufferKind.GRADIENT})
BY_COLUMNS = frozenset({BufferKind.STATE, BufferKind.STATE_GRADIENT})


@dataclass(frozen=True)
class Buffer:
    """A tensor that is held in the step of a segment.

    Attributes:
        node: the captured value that it is, or whose gradient it is. Identical segments share procedures, so
            it is a node of the segment whose programs they are. None for what is kept.
        dim: of a state, that of its rows.
        by_chunk: a state with an entry for what each chunk begins with, and one for the end, in dim 0.
        wide: a sum over chunks, in float32 where the value is in half precision.
    """

    kind: BufferKind
    node: Node | None = None
    dim: int = 0
    wide: bool = False
    by_chunk: bool = False

    @property
    def name(self) -> str:
        """Readable, and another one for each buffer of a procedure."""
        return self.kind.value if self.node is None else f"{self.kind.value}_{self.node.name}"


@dataclass(frozen=True)
class Allocate:
    """Memory for a buffer, with zeros or with anything.

    Attributes:
        place: where it lies. What lies elsewhere comes to the device, and leaves it, by the rows of a chunk.
        own: of a state, or its gradient, the rows of this device alone.
    """

    buffer: Buffer
    zero: bool = False
    place: str = DEVICE
    own: bool = False


@dataclass(frozen=True)
class Overwrite:
    """A buffer takes the memory of `old`, row by row, after the chunk has read them.

    Where somebody else may hold that memory it gets memory of its own, with zeros or with anything.

    Attributes:
        place: where both lie, as of `Allocate`.
    """

    buffer: Buffer
    old: Buffer
    zero: bool = False
    place: str = DEVICE


@dataclass(frozen=True)
class Free:
    """A buffer that nobody reads any more is let go; of what is kept, the part of the chunk that is run."""

    buffer: Buffer


class Over(Enum):
    """The rows that a loop runs over, for each sample of the batch."""

    RUN = "that are run"  # all rows; in a padded batch those that the loss can depend on
    COUNTED = "that count in the loss"  # of a loss head
    NOT_COUNTED = "that do not count in the loss"


@dataclass(frozen=True)
class Chunks:
    """A loop over the chunks of the sequence, from the first to the last or in reverse.

    Attributes:
        share: of all rows, those that it runs over.
        size: how many rows a chunk has at most.
    """

    body: tuple[Instruction, ...]
    reverse: bool = False
    over: Over = Over.RUN
    share: Share = ALL
    size: ChunkSize = ChunkSize.LAYER


@dataclass(frozen=True)
class Run:
    """A program on one chunk: on its rows of what goes by rows, and its columns of what goes by columns.

    Attributes:
        program: its kind, see `SegmentPrograms`.
        inputs: in order; after sizes and a seed.
        results: what it returns: the chunk's rows of buffers, and what is kept.
        writes: states of which it writes the chunk's rows itself.
        adds: sums that it adds to itself.
        finishes: state gradients of which it differentiates the chunk's rows. Nothing is added to those rows
            afterwards: what reads them has been differentiated, by this call at the latest.
        own: it reads no columns but those of its own rows.
        by_blocks: the states hold the rows of this device. Those of others come while it runs, and what it
            adds to their gradients goes to them, see NOTE [columns in blocks]; all devices run it together.
        price: what is saved of the chunk, by the forward, or was: a program computes nothing of it again.
        rewrites: states whose rows of the chunk it writes once more, with what they hold.
    """

    program: str
    inputs: tuple[Buffer, ...]
    results: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    adds: tuple[Buffer, ...] = ()
    finishes: tuple[Buffer, ...] = ()
    own: bool = False
    by_blocks: bool = False
    price: Price | None = None
    rewrites: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class WriteRows:
    """The result of the chunk's program becomes the chunk's rows of a buffer, or is added to them."""

    buffer: Buffer
    add: bool = False


@dataclass(frozen=True)
class Roll:
    """A state gradient has from now on the columns that the chunk reads: what is there of them, else zeros.

    Those that only later chunks read were differentiated with them.
    """

    buffer: Buffer


@dataclass(frozen=True)
class Hand:
    """The result of the chunk's program is handed to the segment that reads it, see `Procedure.passing`."""

    buffer: Buffer


@dataclass(frozen=True)
class ZeroRows:
    """The chunk's rows of a buffer become zero."""

    buffer: Buffer


@dataclass(frozen=True)
class Keep:
    """What the chunk's program returned for the backward is kept."""

    buffer: Buffer


@dataclass(frozen=True)
class Normalize:
    """A buffer is divided by the power of two just above its greatest element, see NOTE [float16]."""

    buffer: Buffer


@dataclass(frozen=True)
class Scale:
    """A finished gradient is multiplied by that of the loss, and by what `Normalize` has divided by."""

    buffer: Buffer


@dataclass(frozen=True)
class Round:
    """A sum takes the dtype of what it is the gradient of: it is finished."""

    buffer: Buffer


@dataclass(frozen=True)
class AllGather:
    """Each device has filled its own rows of a state; afterwards each has all rows."""

    buffer: Buffer


@dataclass(frozen=True)
class ReduceScatter:
    """A device's own rows of a state gradient become what is added to them on all devices, summed.

    Attributes:
        others: what the device itself has added is differentiated already: the sum is over the others.
    """

    buffer: Buffer
    others: bool = False


@dataclass(frozen=True)
class Receive:
    """What the device before has of a state, up to its own rows; of a gradient, the device behind."""

    buffer: Buffer


@dataclass(frozen=True)
class Send:
    """The next device, the one that waits in `Receive`, is sent what it needs of a state or its gradient."""

    buffer: Buffer


Instruction = (
    Allocate
    | Overwrite
    | Free
    | Chunks
    | Run
    | WriteRows
    | Roll
    | Hand
    | ZeroRows
    | Keep
    | Normalize
    | Scale
    | Round
    | AllGather
    | ReduceScatter
    | Receive
    | Send
)
