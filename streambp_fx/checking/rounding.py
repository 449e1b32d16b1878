"""By how much rounding alone moves what a short step gives, and which differences are more than that."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .short_steps import VANISHING, Difference, Outcome, differences

log = logging.getLogger(__name__)
# Relative differences that rounding may make, by dtype; above it, rounding is measured.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
# A difference of so many times what noise makes is none of rounding, see NOTE [rounding as noise]. Of the 272
# parameters of SmolLM2, in float32, the worst of a right step has 2.01.
BEYOND = 4.0
# Below this a difference counts only from so many times what noise makes: a product of many terms, few of
# them large, rounds at each addition, which noise of its result knows nothing of. On one machine gradients of
# SmolLM2 in float32 differ by 2e-4 where noise makes 1e-5. Where a graph computes in several dtypes it is the
# coarsest that counts.
CLEAR = {**RTOL, torch.float64: 1e-7, torch.float32: 1e-3}
FAR_BEYOND = 64.0
# Two draws of noise differ by chance: that of a gradient counts as no less than what this share of them has
# at most.
USUAL = 0.9
# Noise, as a share of the norm of the whole gradient, above which nothing can be told.
DEAF = 0.25


class TooRough(Exception):
    """Rounding alone changes the gradients by as much as a wrong step would."""


@dataclass(frozen=True)
class Rounding:
    """What is rounding in the differences of two short steps, and what is more.

    Attributes:
        module: the captured graph.
        run: runs a step with the inputs of the two.
        finest: relative difference that rounding may make in the finest dtype of the step.
        coarsest: the one from which a difference is clear in the coarsest dtype.
    """

    module: GraphModule
    run: Callable[[Callable[..., Any]], Outcome]
    finest: float
    coarsest: float

    def beyond(self, expected: Outcome, found: Outcome) -> tuple[dict[Difference, float], list[Difference]]:
        """The relative difference of every value, and those that rounding does not make.

        Raises:
            TooRough: nothing can be told.
        """
        floor = VANISHING * expected.total
        relative = {d: d.relative(floor) for d in differences(expected, found)}
        suspects = [d for d in relative if relative[d] > self.finest]
        if not suspects or not all(math.isfinite(d.gap) for d in suspects):
            return relative, suspects
        clear = [d for d in suspects if relative[d] > self.coarsest]
        noise, whole = self._noise(expected, 2 if clear else 1)
        of_gradients = sorted(n for (is_gradient, _), n in noise.items() if is_gradient)
        usual = of_gradients[int(USUAL * (len(of_gradients) - 1))]
        known = {d: max(noise.get(d.key, 0.0), usual * d.is_gradient) for d in suspects}
        log.debug("noise %s", [(d.what, relative[d], known[d]) for d in suspects])
        beyond = [d for d in clear if relative[d] > BEYOND * known[d]]
        if clear and not beyond and not whole <= DEAF * expected.total:
            raise TooRough
        far = [d for d in suspects if relative[d] > FAR_BEYOND * max(known[d], self.finest)]
        return relative, beyond + [d for d in far if d not in beyond]

    def _noise(self, expected: Outcome, draws: int) -> tuple[dict[tuple[bool, int], float], float]:
        """What noise makes of each value, and of all gradients together."""
        floor, whole = VANISHING * expected.total, 0.0
        noise: dict[tuple[bool, int], float] = {}
        for seed in range(draws):
            every = list(differences(expected, self.run(Noisy(self.module, seed).run)))
            whole = max(whole, math.hypot(*(d.gap for d in every if d.is_gradient)))
            for d in every:
                noise[d.key] = max(noise.get(d.key, 0.0), d.relative(floor))
        return noise, whole


class Noisy(Interpreter):
    """Runs a graph with every value and every gradient rounded a little otherwise.

    NOTE [rounding as noise]: a streamed step sums in another order. How far that moves a gradient depends on
    the model; it is measured, by moving every value by up to one unit of its last place at random. But not
    those near the greatest number of the dtype: they are masks, or scores under one, and a row that sees
    nothing but them would see another column each time.
    """

    def __init__(self, module: GraphModule, seed: int) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Node) -> Any:
        """Run a node, and move what it computes, and its gradient, by up to one unit of the last place."""
        given = [v for v in (self.env[m] for m in n.all_input_nodes) if isinstance(v, Tensor)]
        found = super().run_node(n)
        if n.op not in ("call_function", "call_method", "call_module"):
            return found
        if isinstance(found, Tensor):
            return self._moved(found, given)
        if type(found) in (tuple, list):
            return type(found)(self._moved(v, given) if isinstance(v, Tensor) else v for v in found)
        return found

    def _moved(self, value: Tensor, given: list[Tensor]) -> Tensor:
        """Views and what was changed in place stay what they are."""
        if not value.is_floating_point() or any(value is v for v in given) or value._is_view():
            return value
        places = {v.untyped_storage()._cdata for v in given}
        if value.untyped_storage()._cdata in places:
            return value
        if value.requires_grad:
            moved = value + self._noise(value)
            moved.register_hook(lambda g: g + self._noise(g))
            return moved
        return value + self._noise(value)

    def _noise(self, value: Tensor) -> Tensor:
        eps, greatest = torch.finfo(value.dtype).eps, torch.finfo(value.dtype).max
        drawn = torch.rand(value.shape, generator=self.generator, dtype=torch.float32, device="cpu")
        drawn.mul_(2 * eps).sub_(eps)
        moved = value.detach() * drawn.to(value.device, value.dtype)
        return moved.nan_to_num(0.0, 0.0, 0.0).masked_fill_(value.detach().abs() >= greatest / 16, 0.0)
