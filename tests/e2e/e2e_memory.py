"""Live tensor bytes of steps, their work, and batches for ways to hold less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from e2e_models import padded, plain
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from streambp_fx.measure.live_bytes import LiveBytes
from streambp_fx.passes.graph.ops.row_selection import SELECTIONS

# For each way to hold less: several chunks with an odd tail, one chunk, less than one, padding on both sides.
BATCHES = {
    "T=67": plain(2, 67),
    "one chunk": plain(2, 16),
    "T=3": plain(2, 3),
    "padded": padded(67, "left"),
    "padded right": padded(50, "right"),
}


def measure(run: Callable[[], Any], known: Any = ()) -> LiveBytes:
    with LiveBytes(known) as meter:
        run()
    return meter


def live(model: Any, batch: dict[str, Any]) -> int:
    """Bytes that are alive at once in a step, but for weights, gradients and inputs."""
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    known += [v for v in batch.values() if isinstance(v, torch.Tensor)]
    return measure(lambda: model(**batch).loss.backward(), known).peak


class Work(TorchDispatchMode):
    """Counts the multiplications and additions of matrix products and attention."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = SELECTIONS.get(func)  # one op that is made of others
        with self if kernel is not None else contextlib.nullcontext():
            out = (kernel or func)(*args, **(kwargs or {}))
        if func is torch.ops.aten.linear.default:  # as it is below autograd
            self.total += 2 * args[0].numel() * args[1].shape[0]
        name = func.overloadpacket.__name__.rstrip("_")  # products into a buffer are products
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        self.total += count(*args, **(kwargs or {}), out_val=out) if count is not None else 0
        return out
