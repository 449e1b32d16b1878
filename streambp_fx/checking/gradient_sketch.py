"""Gradients reduced to a few random projections, and how far two of them are from one another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Tensors of fewer elements are compared as they are.
SMALL = 2048
LEFT, RIGHT = 4, 8
# Elements that are converted at once.
BLOCK = 1 << 22


@dataclass(frozen=True)
class Sketch:
    """Numbers that stand for a tensor: the values of a small one, else projections of it.

    NOTE [projections]: for a matrix G and vectors r, c of independent standard normal numbers, the mean of
    (r' G c)^2 is the squared Frobenius norm of G. So the root mean square of a few of them tells the norm of
    the difference of two tensors from their sketches, to some ten percent, at the cost of reading each once.

    Attributes:
        values: float64, 1-D.
        exact: the values are those of the tensor.
        sparse: the tensor was sparse.
    """

    values: Tensor
    exact: bool
    sparse: bool = False

    @property
    def norm(self) -> float:
        """The norm of the tensor: exact for a small one, else an estimate."""
        return _size(self.values, self.exact)

    def distance(self, other: Sketch) -> float:
        """Norm of the difference of the two tensors; infinite if one is finite and the other is not."""
        if self.values.shape != other.values.shape:
            return math.inf
        gap = _size(self.values - other.values, self.exact)
        return gap if math.isfinite(gap) else math.inf


def _size(values: Tensor, exact: bool) -> float:
    if not values.numel():
        return 0.0
    total = float(values.square().sum())
    return math.sqrt(total if exact else total / values.numel())


@torch.no_grad()
def sketch(value: Tensor, seed: int) -> Sketch:
    """The sketch of a real or complex tensor; two of the same shape and seed can be compared."""
    value = value.detach()
    sparse = value.layout is not torch.strided
    if value.is_complex():
        value = torch.view_as_real(value.to_dense() if sparse else value)
    if value.numel() < SMALL:
        dense = value.to_dense() if value.layout is not torch.strided else value
        values = torch.empty(dense.numel(), dtype=torch.float64, device="cpu").copy_(dense.flatten())
        return Sketch(values, True, sparse)
    rows = value.shape[0] if value.dim() > 1 else 1
    columns = value.numel() // rows
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    left, right = (
        _normal(rows, LEFT, seed, wide, value.device),
        _normal(columns, RIGHT, seed + 1, wide, value.device),
    )
    if value.layout is torch.sparse_coo and value.sparse_dim() == 1:
        value = value.coalesce()
        left = left[value.indices()[0]]
        value = value.values()
    elif sparse:
        value = value.to_dense()
    matrix = value.reshape(left.shape[0], columns)
    found = torch.zeros(LEFT, RIGHT, dtype=torch.float64, device=value.device)
    step = max(1, BLOCK // columns)
    for start in range(0, matrix.shape[0], step):
        block = matrix[start : start + step].to(wide) @ right
        found += (left[start : start + step].T @ block).double()
    return Sketch(found.flatten().cpu(), False, sparse)


def _normal(size: int, count: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, count, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
