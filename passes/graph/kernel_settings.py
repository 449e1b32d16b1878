"""Attention without PyTorch's fused kernels, while the compiler compares numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_ATTENTION = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
_TRACED: ContextVar[bool] = ContextVar("_TRACED", default=False)


def plain_attention(inputs: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Within, on devices other than CPUs: PyTorch's attention is products and a softmax, in this thread.

    NOTE [numbers of kernels]: kernels for GPUs differ in more than rounding. cuDNN's gives a row whose mask
    hides every column a mean of values, where all others give 0; some rescale the rows of a tile together, so
    that a row is rounded in another way when others change (both seen on an H100, docs/gpu.md). So what is
    compared with a streamed step, and what is tried row by row, runs without them. PyTorch's own switches for
    kernels are of the whole process, and another thread's step may be running.

    Args:
        inputs: tensors of any shape and dtype among them, of which the devices are looked at.
    """
    on_cpu = all(v.device.type == "cpu" for v in inputs if isinstance(v, Tensor))
    return contextlib.nullcontext() if on_cpu else _PlainAttention()


@contextlib.contextmanager
def kernels_as_they_are() -> Iterator[None]:
    """Within: `plain_attention` is off, since a trace is of what will run after it."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


class _PlainAttention(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in _ATTENTION or _TRACED.get():
            return function(*args, **(kwargs or {}))
        return _laid_out(_by_products(*args, **(kwargs or {})), function, args, kwargs or {})


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, with the casts that autocast gives it."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the op adds what it is given
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(attn_mask.logical_not(), float("-inf"))
    with torch.autocast(device, enabled=False):
        out, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out


def _laid_out(found: Tensor, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """A result in the memory layout that the attention itself gives it: views that follow rely on it."""
    with FakeTensorMode() as mode, torch.no_grad():
        like = lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x  # noqa: E731
        wanted = function(*tree_map(like, args), **tree_map(like, kwargs)).stride()
    if found.stride() == wanted:
        return found
    empty = torch.empty_strided(found.shape, wanted, dtype=found.dtype, device=found.device)
    return empty.copy_(found)
