"""Where saved tensors lie between forward and backward: host memory or disk instead of the device.

A store is a pair of hooks on what autograd saves (`torch.autograd.graph.saved_tensors_hooks`), so a tensor is
given up and comes back when autograd would have kept and used it, and is gone when autograd drops it.
Transfers run beside the computation. When the step waits for them is said by its instructions, see
`passes.s6_schedule.transforms.move_what_is_kept`; reading begins one segment ahead.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OffloadError
from ..versions.differences import offload_ops
from .segments import rows_elsewhere


class Stored:
    """A tensor that lies elsewhere.

    Attributes:
        group: number of the segment that saved it.
        like: its shape, strides, dtype and device.
        place: where it lies, as the store has it.
        arriving: the transfer back, while it is under way.
        asked: it was begun once; what is not asked for again is not fetched again.
    """

    def __init__(self, group: int, tensor: Tensor) -> None:
        self.group = group
        self.like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.place: Any = None
        self.arriving: Any = None
        self.asked = False


@dataclass(frozen=True)
class Resident:
    """A tensor that stays where it is, and how often it had been changed in place when it was saved."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """The tensor, in its shape and dtype.

        Raises:
            RuntimeError: it was changed since. Autograd itself does not look at what a hook has packed.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(self.tensor.shape)} (a weight, a buffer, or an input "
                "that is filled again, say) was changed between forward and backward of a streamed step"
            )
        return self.tensor


class Store(ABC):
    """What both places share: which tensors go, and in which order they are fetched.

    Args:
        resident: tensors that stay, such as parameters and what all segments read.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self.resident = {t.untyped_storage()._cdata for t in resident}
        self.groups: list[list[weakref.ref[Stored]]] = []

    def begin(self) -> None:
        """The next segment begins that keeps something."""
        self.groups.append([])

    def pack(self, tensor: Tensor) -> Resident | Stored:
        """What autograd keeps for a tensor of any shape and dtype: itself if it stays, else where it lies."""
        stays = tensor.untyped_storage()._cdata in self.resident or rows_elsewhere.is_elsewhere(tensor)
        if stays or not tensor.numel():
            return Resident(tensor, tensor._version)
        stored = Stored(len(self.groups) - 1, tensor)
        self.send(stored, tensor)
        self.groups[-1].append(weakref.ref(stored))
        return stored

    def unpack(self, packed: Resident | Stored) -> Tensor:
        """The tensor again, with its shape, dtype and device.

        What the segment before saved begins to come back as well.

        Raises:
            RuntimeError: it stayed, and was changed in place.
        """
        if isinstance(packed, Resident):
            return packed.unchanged()
        if packed.arriving is None:
            self._ask(packed)
        for stored in (*self._unasked(packed.group), *self._unasked(packed.group - 1)):
            self._ask(stored)
        arriving, packed.arriving = packed.arriving, None
        return self.receive(arriving)

    def _ask(self, stored: Stored) -> None:
        stored.arriving, stored.asked = self.fetch(stored), True

    def _unasked(self, group: int) -> list[Stored]:
        found = (r() for r in self.groups[group]) if group >= 0 else ()
        return [s for s in found if s is not None and not s.asked]

    @abstractmethod
    def settle(self, group: int) -> None:
        """Wait until what this segment and those before it saved has left."""

    @abstractmethod
    def send(self, stored: Stored, tensor: Tensor) -> None:
        """Begin to move a tensor, of any shape and dtype, away; it is not changed meanwhile."""

    @abstractmethod
    def fetch(self, stored: Stored) -> Any:
        """Begin to bring a tensor back."""

    @abstractmethod
    def receive(self, arriving: Any) -> Tensor:
        """The tensor that `fetch` brings, once it is there, with the shape and dtype that it had."""


class DiskStore(Store):
    """A temporary file without a name, in the folder that TMPDIR names; one thread writes and reads it."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__(resident)
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.end = 0
        self.worker = ThreadPoolExecutor(1, "streambp-offload")
        self.leaving: list[tuple[int, Future]] = []

    def settle(self, group: int) -> None:
        """Wait until what this segment and those before it saved is written."""
        while self.leaving and self.leaving[0][0] <= group:
            _result(self.leaving.pop(0)[1])

    def send(self, stored: Stored, tensor: Tensor) -> None:
        """Copy a tensor to host memory, and hand it to the thread that writes the file."""
        flat = _flat(tensor.cpu())
        stored.place = (self.end, flat.nbytes, flat.numel() == tensor.numel() and _is_dense(tensor))
        self.end += flat.nbytes
        self.leaving.append((stored.group, self.worker.submit(self._write, [flat], stored.place[0])))

    def fetch(self, stored: Stored) -> Future:
        """Have a tensor read back by that thread."""
        flat = torch.empty(stored.place[1], dtype=torch.uint8, device="cpu")  # here: meters see this thread
        return self.worker.submit(self._read, stored, [flat])

    def receive(self, arriving: Future) -> Tensor:
        """Wait for the thread, and return the tensor on its device."""
        self.settle(len(self.groups))
        return _result(arriving)

    def _write(self, handed: list[Tensor], offset: int) -> None:
        # Taken out of the list: the pool holds the arguments a moment longer than the result is waited for.
        data = memoryview(handed.pop().view(torch.uint8).numpy())  # type: ignore[arg-type]
        while data:
            count = os.pwrite(self.file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def _read(self, stored: Stored, handed: list[Tensor]) -> Tensor:
        flat = handed.pop()
        offset, _, dense = stored.place
        shape, stride, dtype, device = stored.like
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        while data:
            got = os.preadv(self.file.fileno(), [data], offset)
            if got == 0:
                raise OSError("the file of offloaded tensors is shorter than what was written")
            data, offset = data[got:], offset + got
        values = flat.view(dtype)
        whole = values.as_strided(shape, stride) if dense else values.view(shape)
        return whole.to(device)


class HostStore(Store):
    """Host memory, for a device that has its own: pinned buffers and a stream beside the computation.

    The transfers are PyTorch's ops for it (`torch._functorch._activation_offloading`).

    Raises:
        OffloadError: PyTorch has no such ops.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__(resident)
        ops = offload_ops()
        if ops is None:
            raise OffloadError(
                f'offload="host" needs the offload ops of PyTorch 2.12 or later; this is {torch.__version__}'
            )
        self.ops: Any = ops
        self.leaving: list[tuple[int, Tensor, Tensor]] = []

    def settle(self, group: int) -> None:
        """Have the computation wait for the copies up to this segment, and let the originals go."""
        while self.leaving and self.leaving[0][0] <= group:
            self.ops.wait_tensor(self.leaving.pop(0)[1])  # only then is the tensor on the device let go

    def send(self, stored: Stored, tensor: Tensor) -> None:
        """Begin to copy a tensor to host memory, beside the computation."""
        stored.place = self.ops.offload(tensor)
        self.leaving.append((stored.group, stored.place, tensor))

    def fetch(self, stored: Stored) -> Tensor:
        """Begin to copy a tensor back to its device."""
        self.settle(len(self.groups))
        shape, stride, _, device = stored.like
        return self.ops.reload(stored.place, device, list(shape), list(stride))

    def receive(self, arriving: Tensor) -> Tensor:
        """Have the computation wait for the copy, and return the tensor."""
        return self.ops.wait_tensor(arriving)


def store_for(place: str, device: torch.device, resident: Iterable[Tensor]) -> Store | None:
    """The store of a policy; None where nothing is to be moved: the CPU's memory is host memory.

    Args:
        place: "none", "host" or "disk", see `Options.offload`.
        device: of the model.
        resident: tensors, of any shape and dtype, that stay on it.

    Raises:
        OffloadError: this PyTorch cannot, or no temporary file can be made.
    """
    if place == "disk":
        try:
            return DiskStore(resident)
        except OSError as error:
            raise OffloadError(f'offload="disk": no temporary file can be made ({error})') from error
    return HostStore(resident) if place == "host" and device.type != "cpu" else None


def _result(future: Future) -> Any:
    try:
        return future.result()
    except OSError as error:
        raise OffloadError(
            f'offload="disk": {error}. Make room, or name another folder in TMPDIR; the step has no gradients'
        ) from error


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one piece of memory, in whatever order of dims."""
    return torch._debug_has_internal_overlap(tensor) == 0 and _extent(tensor) == tensor.numel()


def _extent(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: Tensor) -> Tensor:
    """The elements as one dim: in memory order if the tensor is dense, else in order of its dims."""
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)
