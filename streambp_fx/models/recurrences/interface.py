"""What is the same of all functions that go along the sequence with a state.

An interface says how such a function is called with a state, and what stands in for a call when a model is
captured: the op. A call that the op cannot say is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...passes.graph.ops.recurrence import Recurrence, RunRecurrence
from ...versions.differences import is_plain_recurrence

Operands = list[Tensor | None]


@dataclass(frozen=True)
class Interface:
    """How one kind of function is called.

    Attributes:
        step: the function as a step with a state.
        captured: what is captured in its place, given its name, the function, and whether it ignores
            arguments that it does not name.
        recurrence: what is known of it, given its name and its step.
        trial: operands and settings to try it with, of so many rows.
        plain: the function on operands and settings, whole, as a model calls it.
        own: it must be the stand-in of a kernel, and not the kernel.
    """

    step: Callable[[Callable], RunRecurrence]
    captured: Callable[[str, Callable, bool], Callable]
    recurrence: Callable[[str, RunRecurrence], Recurrence]
    trial: Callable[[int, torch.device], tuple[Operands, list[float]]]
    plain: Callable[[Callable, Operands, list[float]], Tensor]
    own: bool = False

    def fits(self, function: Callable) -> bool:
        """True if a function has the parameters of what is captured in its place: order, names, defaults."""
        return _parameters(self.captured("", function, False)) == _parameters(function)


def _parameters(function: Callable) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD]


KERNEL = "is_new_implementation"


def is_known(function: Callable) -> bool:
    """True for a function of transformers that calls a kernel, or what stands in for it."""
    own = (getattr(function, "__module__", "") or "").startswith("transformers.models.")
    return own and (KERNEL in function.__code__.co_freevars or is_plain_recurrence(function))


def is_plain(function: Callable) -> bool:
    """True if a known function calls what stands in for a kernel that is not installed: plain PyTorch.

    It ignores arguments that it does not name, but for those that it refuses.
    """
    return inspect.getclosurevars(function).nonlocals.get(KERNEL, False) is False


def says_more(rest: dict[str, Any], ignores: bool) -> bool:
    """True if arguments that an interface does not name may mean something to the function."""
    if not ignores:
        return any(value is not None for value in rest.values())
    return rest.get("cu_seqlens") is not None or rest.get("seq_idx") is not None


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
