"""way: in which way the chunk programs of a segment are run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graph.facts import Segment, tensors_of
from .instructions import DEVICE, Buffer
from .saving import Piece


@dataclass(frozen=True)
class Way:
    """What the instructions of a segment depend on besides its programs.

    Attributes:
        full: some row may read all rows.
        left_out: some rows of some samples are not run.
        overwrites: buffers whose memory the gradient of a streamed input takes, if nobody else holds it: the
            cotangent in a backward, the input itself in a loss.
        half: float16 occurs in a loss.
        several: each of several devices runs its own rows, see NOTE [rows on several devices].
        by_blocks: each of them holds the states of its own rows alone; those of others come while a chunk
            runs, see NOTE [columns in blocks].
        saves: what is kept of which rows for the backward, besides the inputs; nothing if it is empty.
        together: its loop runs together with those of its neighbours, see NOTE [chunks first]: rows that it
            takes from them, and hands to them, one chunk at a time. None: it runs by itself.
        elsewhere: rows that lie in `place` and come to the device chunk by chunk, see
            `s6_schedule.rows_elsewhere`.
        place: "host" or "disk", if there are any.
        keeps_states: the states of recurrences are kept from the forward to the backward, see
            `s6_schedule.kept_states`.
    """

    full: bool = False
    left_out: bool = False
    overwrites: frozenset[Buffer] = frozenset()
    half: bool = False
    several: bool = False
    by_blocks: bool = False
    saves: tuple[Piece, ...] = ()
    together: frozenset[Buffer] | None = None
    elsewhere: frozenset[Buffer] = frozenset()
    place: str = DEVICE
    keeps_states: bool = False


def is_half(segment: Segment) -> bool:
    """True if float16 occurs between the loss and the head's input."""
    nodes = (*segment.rows, *segment.nodes)
    return any(t.dtype == torch.float16 for n in nodes for t in tensors_of(n))
