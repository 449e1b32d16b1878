"""Memory for rows that lie elsewhere than on the device: in a file, or in host memory beside a GPU.

NOTE [rows in a file]: a tensor whose memory is a file that is mapped is a tensor of the CPU like any other.
The kernel reads a page of it when it is touched, and writes it behind the computation. So nothing is copied
by hand: the rows of a chunk come when a program reads them, those of the next one are asked for a chunk
ahead, and once a chunk has run the pages of its rows are given back, and do not count as the process's.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...errors import OffloadError

# Elements of a tensor elsewhere that are changed at once.
AT_ONCE = 1 << 22
# This PyTorch is for GPUs, beside which host memory is pinned.
HAS_GPUS = torch.version.cuda is not None or torch.version.hip is not None
# By address of its first element: the file of a tensor that lies in one.
_files: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def empty(shape: Sequence[int], dtype: torch.dtype, place: str, zero: bool = False) -> Tensor:
    """A tensor of any shape and dtype that lies elsewhere.

    Args:
        place: "disk", or "host" for a model on a GPU.
        zero: it begins with zeros, as a new file does anyway.

    Returns:
        A tensor of the CPU, contiguous.

    Raises:
        OffloadError: there is no room, or no temporary file can be made.
    """
    size = math.prod(shape) * dtype.itemsize
    if place != "disk" or not size:
        pinned = HAS_GPUS and torch.cuda.is_available() and size > 0
        make = torch.zeros if zero else torch.empty
        return make(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # without room a write to the memory would be fatal
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OffloadError(
            f"offload_rows: {error}. Make room for {size:,} bytes, or name another folder in TMPDIR"
        ) from error
    found = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    _files[found.data_ptr()] = memory
    return found


def is_elsewhere(tensor: Tensor) -> bool:
    """True for a tensor, of any shape and dtype, that `empty` has made, and its views: on disk, or in pinned
    host memory."""
    if tensor.device.type != "cpu":
        return False
    return _file_of(tensor) is not None or (HAS_GPUS and tensor.is_pinned())


def give_back(rows: Tensor) -> None:
    """Let the pages go in which rows of any shape lie; what was written goes to the file."""
    _advise(rows, mmap.MADV_DONTNEED)


def ask_for(rows: Tensor) -> None:
    """Begin to read the pages in which rows of any shape lie."""
    _advise(rows, mmap.MADV_WILLNEED)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor that lies elsewhere by a number, a tensor of shape (), in place."""
    number = float(factor)
    if number == 1.0:
        return
    for part in tensor.view(-1).split(AT_ONCE):
        part.mul_(number)
        give_back(part)


def _file_of(tensor: Tensor) -> mmap.mmap | None:
    if not _files:
        return None
    return _files.get(tensor.untyped_storage().data_ptr())


def _advise(rows: Tensor, advice: int) -> None:
    file = _file_of(rows)
    if file is None:
        return
    page, size = mmap.PAGESIZE, len(file)
    for first, end in _pieces(rows):
        start, stop = (first // page * page, min(end, size))
        if stop > start:
            file.madvise(advice, start, stop - start)


def _pieces(rows: Tensor) -> Iterator[tuple[int, int]]:
    """Where the elements lie, in bytes from the beginning of the memory: pieces without gaps."""
    if not rows.numel():
        return
    inner, count = rows.dim(), 1
    while inner and rows.stride(inner - 1) == count:
        inner, count = inner - 1, count * rows.shape[inner - 1]
    outer = [range(rows.shape[d]) for d in range(inner)]
    for index in itertools.product(*outer):
        first = int(rows.storage_offset()) + sum(k * rows.stride(d) for d, k in enumerate(index))
        yield first * rows.element_size(), (first + int(count)) * rows.element_size()
