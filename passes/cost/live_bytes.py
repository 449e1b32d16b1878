"""A meter of live tensor bytes, counted op by op."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..graph.ops.recurrence import KERNELS
from ..graph.ops.row_selection import SELECTIONS


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and nobody has let go yet.

    A view shares its storage and counts once; a storage that grows (`out=`, `resize_`) counts as it grows.
    Storages that existed before do not count: `known` are those of the tensors given (parameters, the batch).

    Attributes:
        live: bytes at this moment.
        peak: the most there were.
        widest: elements of the largest single storage.
        only_observes: a streamed step runs within it as it does outside, also within a class that extends it.
    """

    only_observes = True

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = self.widest = 0
        self._known: set[int] = set()
        self.ignore(known)
        self._sizes: dict[int, int] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors, of any shape and dtype, do not count either."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _count(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if isinstance(size, torch.SymInt):  # what is compiled meanwhile has no bytes
            return
        before = self._sizes.get(key)
        if key in self._known or size == before:
            return
        if before is None:
            weakref.finalize(storage, self._freed, key).atexit = False
        self._sizes[key] = size
        self.live += size - (before or 0)
        self.peak = max(self.peak, self.live)
        self.widest = max(self.widest, size // t.element_size())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = KERNELS.get(func)  # one that is made of others in Python is measured within
        if func in SELECTIONS and detect_fake_mode((args, kwargs)) is None:  # there no row is selected
            kernel = SELECTIONS[func]
        with self if kernel is not None else contextlib.nullcontext():
            out = (kernel or func)(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor):
                self._count(t)
        return out


def bytes_in(made: Any) -> int:
    """Bytes of results of any shapes and dtypes, as if each had memory of its own."""
    return sum(x.nbytes for x in tree_iter(made) if isinstance(x, torch.Tensor))
