"""Runs graphs such that no value is hidden from the result by another.

NOTE [nothing hidden]: numbers tell two graphs apart only where they are read. What stands behind a mask, a
ReLU of something negative or a factor of zero is computed and shows in nothing, until weights or masks are
others. So graphs are run once more with another function in the place of each elementwise op: the sine of a
sum of its operands, with factors that belong to the op and to its arguments (of a comparison, whether that is
positive). Two graphs that give the same then have the same ops on the same values, but for chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# In the place of nan, inf and -inf.
INFINITE = (0.0, 7.0, -5.0)
# Which give what they are given: a scan has other ones than a loop.
COPIES = {"clone", "copy", "_to_copy", "detach", "alias", "lift_fresh"}


class Revealing(TorchDispatchMode):
    """Within: elementwise ops read all of their operands."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op; what it gives keeps its shape, dtype and memory."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags or _name(func) in COPIES:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        before = [x.detach().clone() if isinstance(x, Tensor) else x for x in given]
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and (found.is_floating_point() or found.dtype == torch.bool):
            with torch.no_grad():
                mixed = _mixed(func, before, found)
                found.copy_(mixed if found.is_floating_point() else mixed > 0)
        return found


def _name(func: OpOverload) -> str:
    """Of the op; the same for one that works in place."""
    return func.overloadpacket.__name__.rstrip("_")


def _mixed(func: OpOverload, given: Sequence[Any], like: Tensor) -> Tensor:
    draws = random.Random(f"{_name(func)} {[x for x in given if not isinstance(x, (Tensor, torch.device))]}")
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    total = torch.full(like.shape, draws.random(), dtype=wide, device=like.device)
    for x in given:
        if isinstance(x, Tensor):
            value = torch.view_as_real(x).sum(-1) if x.is_complex() else x
            total += (0.3 + 0.6 * draws.random()) * torch.nan_to_num(value.to(like.device, wide), *INFINITE)
    return total.sin()
