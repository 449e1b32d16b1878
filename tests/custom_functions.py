"""Custom autograd functions that several tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """x -> 2 x; the others change forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clipped(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)
