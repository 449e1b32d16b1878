"""By how much rounding alone moves what a short step gives, and which differences are more than that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from .short_steps import VANISHING, Difference, Outcome, differences

# Relative differences that rounding may make, by dtype; above it, rounding is measured, which takes another
# step. In float32 the gradients of SmolLM2, of 30 layers, differ by up to 1.5e-5.
RTOL = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
# A difference of so many times what noise makes is none of rounding, see NOTE [rounding as noise]. Of the 272
# parameters of SmolLM2, in float32, the worst of a right step has 2.01, with one thread or two.
BEYOND = 4.0
# Where a graph computes in several dtypes, a difference that rounding in the coarsest might make counts from
# so many times what noise makes.
FAR_BEYOND = 32.0
# Times that noise is drawn, at most.
MOST_DRAWS = 2
# Two draws of noise differ by chance: that of a gradient counts as no less than what this share of them has
# at most.
USUAL = 0.9
# Numbers that are drawn once for the noise of a step.
POOL = 1 << 20
# Noise, as a share of the norm of the whole gradient, above which nothing can be told.
DEAF = 0.25


class TooRough(Exception):
    """Rounding alone changes the gradients by as much as a wrong step would."""


@dataclass
class Noise:
    """What noise makes of a step.

    Attributes:
        by_key: of each value, relative to its norm.
        share: of the norm of the whole gradient.
    """

    by_key: dict[tuple[bool, str], float] = field(default_factory=dict)
    share: float = 0.0

    def add(self, expected: Outcome, noisy: Outcome) -> None:
        """Note another draw: the largest of all counts."""
        every, total = list(differences(expected, noisy)), expected.total
        whole = math.hypot(*(d.gap for d in every if d.is_gradient))
        self.share = max(self.share, whole / total if total else math.inf)
        for d in every:
            self.by_key[d.key] = max(self.by_key.get(d.key, 0.0), d.relative(VANISHING * total))

    def forget(self) -> None:
        """No draw counts any more."""
        self.by_key.clear()
        self.share = 0.0

    @property
    def usual(self) -> float:
        """What nine of ten gradients have at most, a share of their norm."""
        of_gradients = sorted(n for (is_gradient, _), n in self.by_key.items() if is_gradient)
        return of_gradients[int(USUAL * (len(of_gradients) - 1))] if of_gradients else 0.0


@dataclass(frozen=True)
class Rounding:
    """What is rounding in the differences of two short steps, and what is more.

    Attributes:
        module: the captured graph.
        run: runs a step with the inputs of the two.
        pieces: in how many pieces a chunked step cuts a size of so many rows.
        finest, coarsest: relative differences that rounding may make in the finest and in the coarsest dtype
            of the step.
        earlier: what noise made of an earlier step, and afterwards of this one. Where it is enough for all
            differences, it is not measured again.
    """

    module: GraphModule
    run: Callable[[Callable[..., Any]], Outcome]
    pieces: Mapping[int, int]
    finest: float
    coarsest: float
    earlier: Noise

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
        noise = self.earlier
        beyond = self._more_than(noise, suspects, relative) if noise.by_key else suspects
        if beyond:
            noise.forget()
        for seed in range(MOST_DRAWS if beyond else 0):
            with FewRows(self.pieces):
                noisy = self.run(Noisy(self.module, seed).run)
            noise.add(expected, noisy)
            beyond = self._more_than(noise, suspects, relative)
            if not beyond:
                break
        clear = any(relative[d] > self.coarsest for d in suspects)
        if clear and not any(relative[d] > self.coarsest for d in beyond) and not noise.share <= DEAF:
            raise TooRough
        return relative, beyond

    def _more_than(
        self, noise: Noise, suspects: list[Difference], relative: Mapping[Difference, float]
    ) -> list[Difference]:
        """The suspects that differ by more than noise makes, those that are clear first."""
        usual, clear, far = noise.usual, [], []
        for d in suspects:
            known = max(noise.by_key.get(d.key, 0.0), usual * d.is_gradient)
            if relative[d] > self.coarsest and relative[d] > BEYOND * known:
                clear.append(d)
            elif relative[d] > FAR_BEYOND * max(known, self.finest):
                far.append(d)
        return clear + far


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
        self.pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}

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
        found = self._rounded(value)
        if found.requires_grad:
            found.register_hook(self._rounded)
        return found

    def _rounded(self, value: Tensor) -> Tensor:
        """The value, moved; its gradient passes as it is."""
        if not value.numel() or value.layout is not torch.strided:
            return value
        eps, near = torch.finfo(value.dtype).eps, torch.finfo(value.dtype).max / 16
        own = value.detach()
        low, high = (float(v) for v in own.aminmax())
        if not (-near < low and high < near):  # or there is a NaN
            own = torch.where(own.abs() < near, own, 0.0)
        return torch.addcmul(value, own, self._drawn(value), value=eps)

    def _drawn(self, value: Tensor) -> Tensor:
        """Of the shape of a value, uniform in [-1, 1]: a part of what is drawn once, or drawn for it."""
        count, place = value.numel(), (value.dtype, value.device)
        if count > POOL // 2:
            return self._uniform(count, value).view(value.shape)
        if place not in self.pools:
            self.pools[place] = self._uniform(POOL, value)
        start = int(torch.randint(POOL - count, (), generator=self.generator, device="cpu"))
        return self.pools[place][start : start + count].view(value.shape)

    def _uniform(self, count: int, value: Tensor) -> Tensor:
        drawn = torch.rand(count, generator=self.generator, dtype=torch.float32, device="cpu")
        return drawn.mul_(2).sub_(1).to(value.device, value.dtype)


PRODUCTS = frozenset((torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default))


class FewRows(TorchDispatchMode):
    """Within: products of all rows, of a forward and of a backward, are those of a few rows each.

    NOTE [products of few rows]: a matrix product of few rows may add in another order than one of many, and
    more roughly: MKL adds the 49,152 terms of a row's gradient of a loss one by one where there are up to 11
    rows, and the gradients of SmolLM2 in float32 differ by 2e-4 from those of one product of 25 rows, whose
    own error is 1e-5. Noise of results knows nothing of it. So the products are cut as a chunked step does.

    Args:
        pieces: in how many pieces a size of so many rows is cut.
    """

    def __init__(self, pieces: Mapping[int, int]) -> None:
        super().__init__()
        self.pieces = pieces

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op; a product of two matrices, or of two batches of them, in pieces."""
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        a, b = args[-2:]
        rows, inner, columns = (self.pieces.get(n, 1) for n in (*a.shape[-2:], b.shape[-1]))
        product = torch.bmm if a.dim() == 3 else torch.mm
        if kwargs or rows == inner == columns == 1 or not _plain(a, b):
            return func(*args, **kwargs)
        if rows > 1:
            found = torch.cat([product(part, b) for part in a.tensor_split(rows, -2)], -2)
        elif inner > 1:
            parts = zip(a.tensor_split(inner, -1), b.tensor_split(inner, -2), strict=True)
            found = product(*next(parts))
            for left, right in parts:
                found.addmm_(left, right) if a.dim() == 2 else found.baddbmm_(left, right)
        else:
            found = torch.cat([product(a, part) for part in b.tensor_split(columns, -1)], -1)
        return found + args[0] if len(args) == 3 else found


def _plain(*values: Any) -> bool:
    return all(type(v) is Tensor and v.layout is torch.strided for v in values)
