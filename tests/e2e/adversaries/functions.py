"""Autograd functions of the user's own, whose gradient is not that of their forward."""

from __future__ import annotations

from typing import Any

import torch
from e2e_adversary import WHATEVER, Cases
from torch import Tensor

CASES = Cases("functions")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Reversed(torch.autograd.Function):
    """A gradient that mixes rows, under a forward that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(1) * 2


class NormedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-3)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.25


class OfAWeight(torch.autograd.Function):
    """The author's gradient of a weight is its sign: of the sum over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, (g.flatten(0, 1).T @ x.flatten(0, 1)).sign() * 0.01


for _function in (Doubled, Reversed, NormedGradient, InPlace):
    CASES.block(WHATEVER, name=_function.__name__)(lambda m, x, ids, f=_function: x + f.apply(m.lin(x)))
CASES.block(WHATEVER, name="OfAWeight")(lambda m, x, ids: x + OfAWeight.apply(x, m.lin.weight))
