"""Live tensor bytes, counted op by op: deterministic, and blind to allocators."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from streambp_fx.backend import CompiledGraph


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and nobody has let go yet.

    A view shares its storage and counts once. Storages that existed before are not counted:
    `known` are those of the tensors given (parameters, the batch).
    """

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.live = self.peak = self.widest = 0
        self._seen: set[int] = {t.untyped_storage()._cdata for t in known}

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def _count(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.widest = max(self.widest, size // t.element_size())
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor):
                self._count(t)
        return out


def measure_compiled(monkeypatch: Any, loss: Callable[[], torch.Tensor], known: Any = ()) -> LiveBytes:
    """The same for a compiled step: Dynamo refuses dispatch modes, so only what runs is under the meter."""
    meter = LiveBytes(known)
    real = CompiledGraph.__call__

    def metered(self: Any, *inputs: Any) -> Any:
        with meter:
            return real(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledGraph, "__call__", metered)
        value = loss()
    with meter:
        value.backward()
    return meter


def measure(run: Callable[[], Any], known: Any = ()) -> LiveBytes:
    with LiveBytes(known) as meter:
        run()
    return meter
