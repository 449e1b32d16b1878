"""Live tensor bytes, counted op by op: the same on every platform and in every run, and blind to allocators.

Kernels' own workspace is not seen. `measure` has the peak of a process, workspace and all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..backend import around
from ..passes.cost.live_bytes import LiveBytes


def peak_live_bytes(step: Callable[[], object], known: Iterable[torch.Tensor] = ()) -> int:
    """The most bytes of tensors that are alive at once while `step` runs.

    What `step` compiles should be compiled before. What `torch.compile` runs cannot be measured so, because
    Dynamo refuses to run under a meter (see `peak_live_bytes_compiled`); a transformed model can.

    Args:
        step: for example a forward and backward. Gradients that it makes count as well.
        known: tensors, of any shape and dtype, that do not count: the parameters, the batch.
    """
    with LiveBytes(known) as meter:
        step()
    return meter.peak


def peak_live_bytes_compiled(loss: Callable[[], torch.Tensor], known: Iterable[torch.Tensor] = ()) -> int:
    """The same for a step that `torch.compile(backend="streambp")` runs.

    Counted are the graphs that the backend has compiled, and the whole backward.

    Args:
        loss: the forward, which returns the loss, a scalar. It should have been called before, so that it is
            compiled.
        known: tensors that do not count: the parameters, the batch.
    """
    return live_bytes_compiled(loss, known).peak


def live_bytes_compiled(loss: Callable[[], torch.Tensor], known: Iterable[torch.Tensor] = ()) -> LiveBytes:
    """What `peak_live_bytes_compiled` counts, with everything that was counted.

    Args:
        loss: the forward, which returns the loss, a scalar.
        known: tensors, of any shape and dtype, that do not count.
    """
    meter = LiveBytes(known)
    token = around.set(lambda: meter)
    try:
        value = loss()
    finally:
        around.reset(token)
    with meter:
        value.backward()
    return meter
