"""The selective scan of Mamba in plain PyTorch, with a state to begin with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearScan(torch.autograd.Function):
    """h[i] = a[i] * h[i - 1] + b[i], along the dim before the last."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, first: Tensor) -> Tensor:
        """All h, of the shape (..., T, N) of `a` and `b`; `first` is (..., N), all of one dtype."""
        h, before = torch.empty_like(b), first
        for i in range(b.shape[-2]):
            before = torch.addcmul(b[..., i, :], a[..., i, :], before, out=h[..., i, :])
        ctx.save_for_backward(a, h, first)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the last: the gradient of h[i] is what comes to it, and a[i + 1] times the next."""
        a, h, first = ctx.saved_tensors
        total = gradient.clone(memory_format=torch.contiguous_format)
        for i in range(a.shape[-2] - 1, 0, -1):
            total[..., i - 1, :].addcmul_(a[..., i, :], total[..., i, :])
        before = torch.cat([first.unsqueeze(-2), h[..., :-1, :]], -2)
        return before.mul_(total), total, a[..., 0, :] * total[..., 0, :]


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The rows and the last state.

    Equations 2 and 4 of Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023
    (arXiv 2312.00752), with B discretized by Euler's rule, as the kernels of mamba_ssm have it.

    Args:
        hidden_states, dt, z: (batch, channels, T), of any floating dtype.
        A: (channels, N), in the dtype that B and the input are cast to.
        B, C: (batch, N, T).
        D, delta_bias: (channels,).
        delta_softplus: the softplus of `dt` is taken, `delta_bias` added before.
        state: (batch, channels, N); None: zeros.

    Returns:
        (batch, channels, T) and (batch, channels, N).
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    decay = torch.exp(A[None, :, None, :] * dt[..., None])
    added = dt[..., None] * B.transpose(1, 2)[:, None].to(A.dtype) * hidden_states[..., None].to(A.dtype)
    dtype = torch.promote_types(decay.dtype, added.dtype)
    decay, added = decay.to(dtype), added.to(dtype)
    first = torch.zeros_like(decay[:, :, 0]) if state is None else state.to(dtype)
    states = LinearScan.apply(decay, added, first)
    read = C.transpose(1, 2).unsqueeze(-1)
    made = torch.matmul(states.transpose(1, 2).to(hidden_states.dtype), read).squeeze(-1).transpose(1, 2)
    if D is not None:
        made = made + hidden_states * D[None, :, None]
    if z is not None:
        made = made * F.silu(z)
    return made, states[:, :, -1]
