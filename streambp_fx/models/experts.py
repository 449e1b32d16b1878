"""Experts in a loop over those that some row has chosen, captured as one grouped product of all of them.

How often such a loop runs depends on data, and no graph has it. transformers has the same experts in several
forms, by the name of a setting; a class whose loop agrees with another form on random rows is captured in the
form that has a graph. Outside of what is captured the loop runs.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..dynamo.copied_functions import copy_of
from ..dynamo.this_backend import is_traced_for_us

log = logging.getLogger(__name__)
FORMS = "transformers.integrations.moe"
LOOP, TRIED, CAPTURED = "eager", "batched_mm", "grouped_mm"
ROWS, TOP = 7, 2
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# Loops that stand for a product while something is captured, and the modules, by what a form reads of them,
# that were looked at: whether their loop agrees.
_captured: set[Callable[..., Any]] = set()
_tried: dict[Hashable, bool] = {}


def declare_experts(modules: Iterable[nn.Module]) -> bool:
    """Have loops over experts among these modules captured as grouped products from now on.

    Returns:
        True if there are some that were not known before.
    """
    forms = _forms()
    found = False
    for module in modules if forms else ():
        loop = _loop_of(module)
        if loop is None or _state(module) in _tried or any(p.is_meta for p in module.parameters()):
            continue
        try:
            agrees = _agrees(module, loop, forms[TRIED])
        except Exception as error:
            log.info("the experts of %s stay a loop: %s: %s", type(module).__name__, type(error), error)
            agrees = False
        _tried[_state(module)] = agrees
        if agrees and loop not in _captured:
            _capture_as(loop, forms[CAPTURED])
            _captured.add(loop)
        found |= agrees
    return found


def _forms() -> Mapping[str, Any]:
    """What transformers has instead of a loop, by name; nothing in a version that has other forms."""
    known = getattr(sys.modules.get(FORMS), "ALL_EXPERTS_FUNCTIONS", {})
    return known if {TRIED, CAPTURED} <= set(known) else {}


def _capture_as(loop: types.FunctionType, product: Callable[..., Any]) -> None:
    same = copy_of(loop)

    def stands_in(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced_for_us() and _is_captured(self):
            return product(self, *args, **kwargs)
        return same(self, *args, **kwargs)

    torch._dynamo.substitute_in_graph(loop, skip_signature_check=True)(stands_in)


@torch._dynamo.assume_constant_result
def _is_captured(module: nn.Module) -> bool:
    return _tried.get(_state(module), False)


def _state(module: nn.Module) -> Hashable:
    """What a form may read of a module beside weights: its class, its switches, and what replaces methods."""
    switches = sorted((n, v) for n, v in vars(module).items() if isinstance(v, bool) and n != "training")
    replaced = sorted((n, id(v)) for n, v in vars(module).items() if callable(v))
    return type(module), tuple(switches), tuple(replaced), getattr(type(module), "_apply_gate", None)


def _loop_of(module: nn.Module) -> types.FunctionType | None:
    """The loop of a module of transformers that has several forms, if it is the loop that it runs."""
    own, chosen = type(module), getattr(getattr(module, "config", None), "_experts_implementation", None)
    known = hasattr(module, "is_concatenated") and own.__module__.startswith("transformers.models.")
    if chosen != LOOP or not known or "forward" in vars(module):
        return None
    loop = getattr(own.forward, "__wrapped__", None)
    return loop if isinstance(loop, types.FunctionType) else None


def _agrees(module: nn.Module, loop: Callable, other: Callable) -> bool:
    """True if two forms are the same function of random rows, with the module's own weights."""
    weights = [p for p in module.parameters() if p.is_floating_point()]
    count: Any = module.num_experts
    device, dtype = weights[0].device, weights[0].dtype
    width: Any = module.hidden_dim if hasattr(module, "hidden_dim") else module.hidden_size
    with torch.random.fork_rng(), torch.no_grad(), torch._C._DisableAutocast():
        torch.manual_seed(0)
        rows = torch.randn(ROWS, width, dtype=torch.float32, device="cpu").to(device, dtype)
        chosen = (
            torch.rand(ROWS, count, dtype=torch.float32, device="cpu")
            .topk(min(TOP, count))
            .indices.to(device)
        )
        shares = torch.rand(chosen.shape, dtype=torch.float32, device="cpu").to(device, dtype)
        found, want = (f(module, rows, chosen, shares).double() for f in (other, loop))
    error, scale = float((found - want).abs().max()), float(want.abs().max())
    return bool(torch.isfinite(want).all()) and scale > 0 and error <= TOLERANCE.get(dtype, 0.05) * scale
