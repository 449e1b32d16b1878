"""Dropout within a self-check: is the gradient of a streamed step that of its loss, with what it has drawn?

NOTE [dropout in a self-check]: no other run drops what a streamed step drops, so a step is compared with
itself. Two steps with the same seed must be the same, and the gradient along some direction must be what the
loss changes by in that direction. Only small parameters are moved (norms, biases): their gradients come
through all that is dropped after them. A loss may be no smooth function, and a gradient may be meant to be
none of it (`detach`), so nothing is said unless the captured graph, which drops by itself, stands the same
test. A step in which nothing is dropped, or always the same, stands it as well: so not all steps may be the
same that have other seeds, if all those of the captured graph differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .short_steps import VANISHING, Outcome, differences, run

Call = Callable[..., Any]
SEED = 20
# Other seeds. Where little is dropped, steps may be the same by chance: all of these hardly are.
OTHERS = range(SEED + 1, SEED + 9)
# Relative differences between a gradient and differences of the loss, by dtype, that are none of rounding.
SMOOTH = {torch.float64: 1e-5, torch.float32: 1e-2}
# How much of itself the loss is changed by; the second is tried where the first says nothing, or finds fault.
CHANGES = {torch.float64: (1e-4, 1e-5), torch.float32: (1e-2, 3e-3)}
# A gap is clear if it is so many times what two differences of the loss are apart.
APART = 10.0
# No parameter moves by more than this share of its norm.
MOST_MOVED = 0.1
# Elements that are moved, at most; but of one parameter in any case.
MOVED = 1 << 18
# A parameter of zeros is taken to have elements of this size.
LEAST = 1e-2


@dataclass(frozen=True)
class Drawn:
    """What the test has found: True if all is well, False if not, None if it could not tell; and why."""

    ok: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Trial:
    """The test of one way to run a short step.

    Attributes:
        call: takes inputs, gives outputs.
        given: short inputs.
        fixed: positions of parameters that no step changes.
        constant: positions of outputs that are not differentiated.
        rtol: relative differences that two runs of one step may have.
        dtype: float32 or float64: the coarsest of the step.
    """

    call: Call
    given: Sequence[Any]
    fixed: Collection[int]
    constant: Collection[int]
    rtol: float
    dtype: torch.dtype

    def result(self) -> Drawn:
        """Run the test: is the gradient of the short step that of its loss, along one direction?

        The step runs twice with the same random numbers, and the two must agree. Then the slope that the
        gradient gives is compared with a difference quotient of the loss.
        """
        moved = self._moved()
        if not moved:
            return Drawn(None, "no parameter can be moved")
        first = self._run(self.given, moved)
        apart = self._apart(first, self._run(self.given, moved))
        if apart:
            return Drawn(False, f"two steps that draw the same differ: {apart}")
        direction = self._direction(first)
        slope = sum(float((first.whole[k].double() * v).sum()) for k, v in direction.items())
        if not (math.isfinite(slope) and math.isfinite(first.value) and slope and first.value):
            return Drawn(None, "its gradient is not finite, or zero")
        gaps = []
        for change in CHANGES[self.dtype]:
            eps = min(change * abs(first.value / slope), MOST_MOVED)
            found, error = self._difference(direction, eps)
            gap = abs(found - slope)
            share = gap / max(abs(found), abs(slope))
            if share <= SMOOTH[self.dtype]:
                return Drawn(True)
            gaps.append(share if gap > APART * error else None)
        if None in gaps:
            return Drawn(None, "its loss is too rough")
        return Drawn(False, f"the gradient is not that of the loss: {gaps[-1]:.1e} of it along a direction")

    def differing(self) -> Iterator[bool]:
        """Of steps with other seeds, one after the other: does it differ from that with the first seed?"""
        first = self._run(self.given, ()).value
        return (not _near(self._run(self.given, (), seed).value, first, self.rtol) for seed in OTHERS)

    def _run(self, given: Sequence[Any], wanted: Collection[int], seed: int = SEED) -> Outcome:
        torch.manual_seed(seed)
        return run(self.call, given, self.fixed, constant=self.constant, wanted=wanted)

    def _moved(self) -> list[int]:
        """Positions of the smallest parameters."""
        own = [(k, v) for k, v in enumerate(self.given) if k in self.fixed and _is_moved(v)]
        found: list[int] = []
        total = 0
        for position, value in sorted(own, key=lambda pair: pair[1].numel()):
            total += value.numel()
            if found and total > MOVED:
                break
            found.append(position)
        return found

    def _apart(self, first: Outcome, second: Outcome) -> str:
        """What two runs have that is not the same."""
        floor = first.total * VANISHING
        return next((d.what for d in differences(first, second) if d.relative(floor) > self.rtol), "")

    def _direction(self, first: Outcome) -> dict[int, Tensor]:
        """Of each parameter as long as it is: half along its gradient, half at random."""
        generator = torch.Generator().manual_seed(SEED)
        found = {}
        for position, gradient in first.whole.items():
            drawn = torch.randn(gradient.shape, generator=generator, dtype=torch.float64, device="cpu").to(
                gradient.device
            )
            along = gradient.double()
            step = torch.zeros_like(along)
            for part in (drawn, along):
                step += torch.nn.functional.normalize(part.flatten(), dim=0).view_as(part) / math.sqrt(2)
            size = float(torch.linalg.vector_norm(self.given[position].double()))
            found[position] = step * max(size, LEAST * math.sqrt(gradient.numel()))
        return found

    def _difference(self, direction: dict[int, Tensor], eps: float) -> tuple[float, float]:
        """The slope of the loss, and how far off it may be: from two central differences."""
        wide, narrow = (
            (self._value(direction, e) - self._value(direction, -e)) / (2 * e) for e in (eps, eps / 2)
        )
        return (4 * narrow - wide) / 3, abs(narrow - wide)

    def _value(self, direction: dict[int, Tensor], eps: float) -> float:
        given = list(self.given)
        for position, step in direction.items():
            own = given[position]
            moved = (own.detach().double() + eps * step).to(own.dtype)
            given[position] = moved.requires_grad_(own.requires_grad)
        return self._run(given, ()).value


def _near(found: float, other: float, rtol: float) -> bool:
    return abs(found - other) <= rtol * abs(other)


def _is_moved(value: Any) -> bool:
    return type(value) is Tensor and value.requires_grad and value.dtype in SMOOTH and value.numel() > 0
