"""row_chunks: into which chunks the rows of a sequence are cut, wherever they are run, counted or printed."""

from __future__ import annotations

import itertools

#: Rows of a tile of GPU kernels, see NOTE [rows in tiles].
TILE = 128


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
