"""Lines through measurements: scaling exponents and what one more token costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import BenchmarkError


def _arrays(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    if len(x) != len(y) or len(set(x)) < 2:
        raise BenchmarkError("a fit needs measurements at two different sizes or more")
    return np.asarray(x, float), np.asarray(y, float)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """k of y = a x^k, by least squares on logarithms; all values above zero.

    Raises:
        BenchmarkError: fewer than two different sizes, or a value that has no logarithm.
    """
    sizes, values = _arrays(x, y)
    if (sizes <= 0).any() or (values <= 0).any():
        raise BenchmarkError("an exponent can be fitted only through values above zero")
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """b of y = a + b x, by least squares.

    Raises:
        BenchmarkError: fewer than two different sizes.
    """
    return float(np.polyfit(*_arrays(x, y), 1)[0])
