"""Which of PyTorch's attention kernels may run, while the compiler compares numbers and while it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_NAMES = ("flash", "mem_efficient", "math", "cudnn")
#: What was enabled before `plain_attention`; None outside of it.
_BEFORE: ContextVar[tuple[bool, ...] | None] = ContextVar("_BEFORE", default=None)


@contextlib.contextmanager
def plain_attention(inputs: Iterable[Any]) -> Iterator[None]:
    """Within, on devices other than CPUs: PyTorch's attention is products and a softmax.

    NOTE [numbers of kernels]: kernels for GPUs differ in more than rounding. cuDNN's gives a row whose mask
    hides every column the mean of the values, where all others give 0; some rescale the rows of a tile
    together, so that a row is rounded in another way when others change (both seen on an H100, docs/gpu.md).
    So what is compared with a streamed step, and what is tried row by row, runs without them.

    Args:
        inputs: tensors of any shape and dtype among them, of which the devices are looked at.
    """
    if all(v.device.type == "cpu" for v in inputs if isinstance(v, Tensor)):
        yield
        return
    token = _BEFORE.set(_enabled())
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _BEFORE.reset(token)


@contextlib.contextmanager
def kernels_of_the_user() -> Iterator[None]:
    """Within: kernels are enabled as before `plain_attention`: a trace is of what will run after it."""
    before, now = _BEFORE.get(), _enabled()
    if before is None:
        yield
        return
    _enable(before)
    try:
        yield
    finally:
        _enable(now)


def _enabled() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _NAMES)


def _enable(settings: tuple[bool, ...]) -> None:
    for name, setting in zip(_NAMES, settings, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(setting)
