"""The numbers on which a scan is compared with its loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of a tensor so many elements are looked at, to see whether it is one number all over.
SAMPLE = 1024


@dataclass(frozen=True)
class Trial:
    """How two graphs are compared.

    Attributes:
        spread: rows from all over the sequence, and not the first ones.
        draws: whole numbers and masks are drawn.
        reveals: nothing is hidden, see `Revealing`; there is no backward.
        words: for whoever reads of it.
    """

    spread: bool = False
    draws: bool = False
    reveals: bool = False
    words: str = ""


TRIALS = (
    Trial(),
    Trial(spread=True),
    Trial(draws=True, words="for other masks or whole numbers"),
    Trial(reveals=True, words="where nothing is hidden"),
    Trial(spread=True, draws=True, reveals=True, words="where nothing is hidden"),
)
# So many of them must have something finite to compare.
ENOUGH = 2


@contextlib.contextmanager
def same_random_numbers(values: Sequence[Tensor]) -> Iterator[None]:
    """Within: random numbers are drawn from one seed.

    Args:
        values: tensors of any shape and dtype, on the devices whose state must be as it was afterwards.
    """
    cuda = sorted({v.device.index or 0 for v in values if v.is_cuda})
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def ordinary(value: Tensor, seed: int) -> Tensor:
    """The tensor; one that is mostly one number (weights that begin as zeros) with something added.

    Else a wrong step might not be seen: a factor of zero hides it.

    Args:
        value: of any shape and dtype; it is not changed.
        seed: of what is added.
    """
    if not value.is_floating_point() or not value.numel():
        return value
    entries = value.detach().reshape(-1)[:: max(1, value.numel() // SAMPLE)]
    if value.numel() > 1 and (entries == entries.mode().values).double().mean() < 0.5:
        return value
    numbers = torch.Generator(device="cpu").manual_seed(seed)
    added = torch.rand(value.shape, generator=numbers, dtype=torch.float64, device="cpu") * 0.2 + 0.05
    added = added.to(value.device, value.dtype)
    return (value.detach() + added).requires_grad_(value.requires_grad)


@torch.no_grad()
def drawn(value: Tensor, seed: int) -> Tensor:
    """As `ordinary`; masks are drawn, and whole numbers from those that there are: small ones from 0 on.

    Args:
        value: of any shape and dtype; it is not changed.
        seed: of what is drawn.
    """
    if value.is_floating_point() or value.is_complex() or not value.numel():
        return ordinary(value, seed)
    numbers = torch.Generator(device="cpu").manual_seed(seed)
    low, high = int(value.min()), int(value.max())
    if value.dtype == torch.bool or (low >= 0 and high <= 1):
        found = torch.randint(0, 2, value.shape, generator=numbers, device="cpu")
    elif low >= 0:
        found = torch.randint(0, high + 1, value.shape, generator=numbers, device="cpu")
    else:
        places = torch.randint(0, value.numel(), value.shape, generator=numbers, device="cpu")
        return value.flatten()[places.to(value.device)]
    return found.to(value.device, value.dtype)
