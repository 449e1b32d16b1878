"""row_chunks: into which chunks the rows of a sequence are cut, wherever they are run, counted or printed."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

from ..graph.facts import Segment

#: Rows of a tile of GPU kernels, see NOTE [rows in tiles].
TILE = 128


class ChunkSize(Enum):
    """Which of the two numbers of rows a loop takes; the value is its name among options and sizes."""

    LAYER = "chunk"
    LOSS = "loss_chunk"

    def of(self, sizes: Any) -> Any:
        """That number of rows, of anything that has both (a step, sizes that are symbols)."""
        return getattr(sizes, self.value)


def chunk_size(segment: Segment, together: bool = False) -> ChunkSize:
    """What the chunks of a segment are cut by.

    A head, or anything else that goes row by row, has a number of rows of its own: its rows are wide.

    Args:
        together: each chunk goes through several segments, one of which reads along the sequence.
    """
    return ChunkSize.LAYER if segment.mixings or together else ChunkSize.LOSS


def rows_before(segment: Segment, full: bool) -> int | None:
    """How many rows before a chunk its columns begin, at most; None: at the first row of the sequence.

    Args:
        full: some row may read all rows.
    """
    if not segment.mixings:
        return 0
    return None if full or segment.window is None else int(segment.window) - 1


def split_rows(total: int, chunk: int, tile: int = TILE, count: int = 0) -> list[tuple[int, int]]:
    """`(start, length)` of chunks of at most `chunk` rows, as even as possible; of `count` chunks, if given.

    Even chunks need the least memory, and keep the last one from having a single row, for which a program of
    its own is needed.

    NOTE [rows in tiles]: if `chunk` is a multiple of `tile`, so are the rows of all chunks but the last:
    batches of many lengths then have chunks of few sizes. cuDNN compiles a kernel for each, and products on
    GPUs work in such tiles.
    """
    count = count or -(-total // chunk)
    tiled = -(-total // count // tile) * tile
    if chunk % tile == 0 and count > 1 and total - (count - 1) * tiled > 1:
        lengths = [tiled] * (count - 1) + [total - (count - 1) * tiled]
    else:
        least, longer = divmod(total, count)
        lengths = [least + 1] * longer + [least] * (count - longer)
    starts = itertools.accumulate(lengths[:-1], initial=0)
    return list(zip(starts, lengths, strict=True))
