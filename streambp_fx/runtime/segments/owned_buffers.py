"""Small pieces that the segment functions share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ...passes.graph.facts import Facts
from ...passes.s4_trace.cudnn_blocks import MULTIPLE


def as_it_is(tensor: Tensor) -> Tensor:
    """What to save of a tensor, of any shape and dtype, for the backward: the memory that it has now.

    NOTE [values changed before the backward]: autograd finds a change in place by the version of what was
    saved, and raises. It does not find that somebody gave a parameter other memory (`p.data = ...`), and a
    saved leaf would be read with the new one. Eager reads what its ops have saved, which is the old one.
    """
    own_class = type(tensor) in (Tensor, torch.nn.Parameter)
    return tensor.detach() if own_class and tensor.is_leaf and tensor not in changing_memory else tensor


# Parameters that an engine gives other memory each time it gathers them; only it does so.
changing_memory: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: Rows of a tile of GPU kernels, see NOTE [rows in tiles].
TILE = MULTIPLE


def attribute(facts: Facts, node: Node) -> Any:
    """The value of a `get_attr` node."""
    value: Any = facts.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def split_rows(total: int, chunk: int) -> list[tuple[int, int]]:
    """`(start, length)` of chunks of at most `chunk` rows, as even as possible.

    Even chunks need the least memory, and keep the last one from having a single row, for which a program of
    its own is needed.

    NOTE [rows in tiles]: if `chunk` is a multiple of `TILE`, so are the rows of all chunks but the last:
    batches of many lengths then have chunks of few sizes. cuDNN compiles a kernel for each, and products on
    GPUs work in such tiles.
    """
    count = -(-total // chunk)
    tiled = -(-total // count // TILE) * TILE
    if chunk % TILE == 0 and count > 1 and total - (count - 1) * tiled > 1:
        lengths = [tiled] * (count - 1) + [total - (count - 1) * tiled]
    else:
        least, longer = divmod(total, count)
        lengths = [least + 1] * longer + [least] * (count - longer)
    starts = itertools.accumulate(lengths[:-1], initial=0)
    return list(zip(starts, lengths, strict=True))


class OwnedBuffers:
    """Gradient buffers made by one streamed segment for the one before it.

    NOTE [reusing gradient buffers]: autograd hands a segment the gradient of its output. If that is a buffer
    which a later segment made in this same backward, nobody else can hold it (values between segments are
    never visible to the user), and the gradient of the input is written over it. Any other tensor is left
    alone. Buffers are known by a weak reference to their storage, never by address.
    """

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    def add(self, tensor: Tensor) -> None:
        """Note a gradient buffer, of any shape and dtype, that a segment has made in this backward."""
        self._storages = [s for s in self._storages if not s.expired()]
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))

    def take(self, tensor: Tensor) -> bool:
        """True, once, if the tensor lies in such a buffer, whatever its shape and dtype."""
        wanted = tensor.untyped_storage()._cdata
        for k, storage in enumerate(self._storages):
            if storage.cdata == wanted and not storage.expired():
                del self._storages[k]
                return True
        return False
