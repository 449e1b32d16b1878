"""Small pieces that the segment functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ...passes.graph.facts import Facts


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


def attribute(facts: Facts, node: Node) -> Any:
    """The value of a `get_attr` node."""
    value: Any = facts.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


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
