"""Comparing the gradients of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class GradientDifference:
    """The parameter whose gradients differ most: |found - expected| / |expected| in the L2 norm."""

    relative: float
    parameter: str


def largest_difference(expected: Path | str, found: Path | str) -> GradientDifference:
    """Compare two files of gradients, each a dict of parameter name to tensor written by `torch.save`.

    A gradient that is zero in `expected` counts as 0 if it is zero in `found` too, else as infinite.

    Raises:
        ValueError: the files name different parameters, or there are none.
    """
    reference = torch.load(expected, mmap=True)
    other = torch.load(found, mmap=True)
    if reference.keys() != other.keys():
        names = sorted(reference.keys() ^ other.keys())
        raise ValueError(f"gradients in one file only: {', '.join(names[:5])}")
    if not reference:
        raise ValueError(f"{expected} holds no gradients")
    differences = {name: _relative(reference[name], other[name]) for name in reference}
    worst = max(differences, key=lambda name: differences[name])
    return GradientDifference(differences[worst], worst)


def _relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(expected, dtype=torch.float64))
    gap = float(torch.linalg.vector_norm(found.double() - expected.double()))
    if gap != gap:
        return float("inf")
    if norm == 0:
        return 0.0 if gap == 0 else float("inf")
    return gap / norm
