"""Autograd functions between segments of which each device runs its own rows.

See NOTE [shares of a gradient] in `passes.s6_schedule.own_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..segments.own_rows import OwnRows, RowsOfValue, as_numbers
from ..segments.owned_buffers import OwnedBuffers

#: Elements of a tensor that is summed over devices by itself, and not packed with others.
LARGE = 1 << 20


class Gathered(torch.autograd.Function):
    """A whole value, of each device's rows of it.

    Args (of `apply`):
        rows: how they lie.
        partial: the gradient that comes is this device's share and is summed over the devices; else it is
            the same on all of them, and each takes its rows of it.
        value: this device's rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: RowsOfValue, partial: bool, value: Tensor) -> Tensor:
        """All rows, in the whole shape and the dtype of the value."""
        ctx.rows, ctx.partial = rows, partial
        return rows.gather(value)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        """This device's rows of the gradient, in the shape of the value."""
        (gradient,) = gradients
        return None, None, ctx.rows.sum(gradient) if ctx.partial else ctx.rows.slice(gradient)


class Own(torch.autograd.Function):
    """This device's rows of a whole value; the gradient is this device's share of the whole one."""

    @staticmethod
    def forward(ctx: Any, rows: RowsOfValue, value: Tensor) -> Tensor:
        """This device's rows, in the dtype of the value."""
        ctx.rows = rows
        return rows.slice(value)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        """Those rows among zeros, in the shape of the value."""
        return None, ctx.rows.spread(gradients[0])


class CountedOnce(torch.autograd.Function):
    """A value that is read in the same way on all devices: the first one's gradient stands for all."""

    @staticmethod
    def forward(ctx: Any, own: OwnRows, value: Tensor) -> Tensor:
        """The value, in its shape and dtype."""
        ctx.own = own
        return value.view_as(value)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        """The gradient on the first device, zeros of its shape elsewhere."""
        (gradient,) = gradients
        return None, gradient if ctx.own.rank == 0 else torch.zeros_like(gradient)


class Summed(torch.autograd.Function):
    """Leaves whose gradients are sums over the devices, see `reduced`."""

    @staticmethod
    def forward(ctx: Any, own: OwnRows, buffers: OwnedBuffers, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The leaves, in their shapes and dtypes.

        Args:
            buffers: gradients that nobody else holds.
        """
        ctx.own, ctx.buffers = own, buffers
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Sums over the devices, in the shapes and dtypes of the leaves; None where no gradient comes."""
        there = [g for g in gradients if g is not None]
        summed = iter(reduced(there, ctx.own.group, ctx.buffers))
        return (None, None, *(None if g is None else next(summed) for g in gradients))


def summed(own: OwnRows, values: Sequence[Any]) -> list[Any]:
    """The values; gradients of those that are leaves, of any shape and dtype, are summed over the devices."""
    found = list(values)
    learn = [k for k, v in enumerate(found) if isinstance(v, Tensor) and v.requires_grad and v.is_leaf]
    if learn and torch.is_grad_enabled():
        leaves = (found[k] for k in learn)
        for k, value in zip(learn, Summed.apply(own, OwnedBuffers(), *leaves), strict=True):
            found[k] = value
    return found


def reduced(values: Sequence[Tensor], group: Any, buffers: OwnedBuffers) -> list[Tensor]:
    """The sums over the devices of tensors of any shape.

    One collective for each tensor with `LARGE` elements, where it lies if nobody else holds it; and one for
    the others of each dtype, which are packed.

    Args:
        buffers: which of them nobody else holds.
    """
    found = {k: _reduced_alone(v, group, buffers) for k, v in enumerate(values) if v.numel() >= LARGE}
    others = [(k, v) for k, v in enumerate(values) if k not in found]
    for dtype in dict.fromkeys(v.dtype for _, v in others):
        places = [k for k, v in others if v.dtype == dtype]
        flat = torch.cat([as_numbers(values[k].contiguous()).reshape(-1) for k in places])
        dist.all_reduce(flat, group=group)
        sizes = [as_numbers(values[k]).numel() for k in places]
        for k, part in zip(places, flat.split(sizes), strict=True):
            shape = as_numbers(values[k]).shape
            own = part.view(shape)
            found[k] = torch.view_as_complex(own) if values[k].is_complex() else own
    return [found[k] for k in range(len(values))]


def _reduced_alone(value: Tensor, group: Any, buffers: OwnedBuffers) -> Tensor:
    total = value if buffers.take(value) else value.clone()
    numbers = as_numbers(total)
    if numbers.is_contiguous():
        dist.all_reduce(numbers, group=group)
        return total
    packed = numbers.contiguous()
    dist.all_reduce(packed, group=group)
    numbers.copy_(packed)
    return total
