"""Finds functions of a known interface among those of a model, tries them, and has them captured as ops."""

from __future__ import annotations

import itertools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from ...dynamo.copied_functions import copy_of
from ...dynamo.this_backend import is_traced_for_us
from ...passes.graph.ops.recurrence import RECURRENCES, Recurrence
from ...versions.differences import masks_are_not_asked
from .delta_rule import delta_rule
from .interface import Interface, Operands, is_known, is_plain
from .selective_scan import SELECTIVE_SCAN
from .state_space import STATE_SPACE

log = logging.getLogger(__name__)
#: In this order they are tried on a function.
INTERFACES = (delta_rule(0), delta_rule(3), STATE_SPACE, SELECTIVE_SCAN)
# Functions that were looked at.
_seen: set[Callable] = set()
# Rows at which the parts of a trial begin, and how many there are: no part is a whole number of blocks, which
# have 4 rows there.
ENDS = (0, 3, 8, 9)


def declare_recurrences(modules: Iterable[nn.Module]) -> bool:
    """Have functions of a known interface that these modules may call captured as one op from now on.

    Returns:
        True if there are some that were not known before.
    """
    classes = list(dict.fromkeys(cls for m in modules for cls in type(m).__mro__))
    found = masks_are_not_asked(classes, is_traced_for_us)
    for function in list(_functions(classes)):
        if function in _seen:
            continue
        _seen.add(function)
        for interface in INTERFACES:
            if interface.fits(function) and _declare(function, interface):
                found = True
                break
    return found


def _functions(classes: Iterable[type]) -> Iterator[types.FunctionType]:
    """Known functions in the Python modules in which these classes are."""
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        if name in sys.modules:
            values = list(vars(sys.modules[name]).values())
            yield from (v for v in values if isinstance(v, types.FunctionType) and is_known(v))


def _declare(function: types.FunctionType, interface: Interface) -> bool:
    """True if it does what the interface says."""
    if interface.own and not is_plain(function):
        return False
    name = f"{function.__module__}.{function.__qualname__}"
    name = f"{name}#{sum(n.split('#')[0] == name for n in RECURRENCES)}"
    known = interface.recurrence(name, interface.step(function))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fault = _fault(function, interface, known)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        log.info("%s is not captured as a recurrence: %s", name, fault)
        return False
    RECURRENCES[name] = known
    stands_in = interface.captured(name, copy_of(function), is_plain(function))
    torch.compiler.substitute_in_graph(function)(stands_in)
    log.info("%s is captured as a recurrence", name)
    return True


def _fault(function: Callable, interface: Interface, known: Recurrence) -> str:
    """What differs between a function on all rows and on parts of them; "" if nothing does."""
    # whatever the step runs in that is the first to ask; its backwards, too
    with torch.random.fork_rng(), torch.enable_grad(), torch._C._DisableAutocast():
        torch.manual_seed(0)
        return _fault_of_trial(function, interface, known)


def _fault_of_trial(function: Callable, interface: Interface, known: Recurrence) -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operands, settings = interface.trial(ENDS[-1], device)
    whole = interface.plain(function, _leaves(operands), settings)
    given = _leaves(operands)
    weights = torch.randn_like(whole)
    want = _gradients(interface.plain(function, given, settings), given, weights)
    given = _leaves(operands)
    parts, state = [], None
    for start, stop in itertools.pairwise(ENDS):
        own = [_rows(x, dim, start, stop) for x, dim in zip(given, known.dims, strict=True)]
        made, state = known.step(own, settings, state)
        parts.append(made)
    joined = torch.cat(parts, known.rows)
    sizes = known.state_sizes_of(operands)
    like = operands[known.like]
    assert like is not None and state is not None
    if joined.shape != whole.shape or whole.shape != like.shape or list(state.shape) != sizes:
        return f"it makes {tuple(whole.shape)} and a state of {tuple(state.shape)}"
    if not _close(joined, whole):
        return "its rows are others if it is called on parts, with the state handed over"
    found = _gradients(joined, given, weights)
    if not all(_close(a, b) for a, b in zip(found, want, strict=True)):
        return "its gradients are others if it is called on parts, with the state handed over"
    return ""


def _leaves(operands: Operands) -> Operands:
    return [None if x is None else x.detach().clone().requires_grad_() for x in operands]


def _rows(value: Tensor | None, dim: int | None, start: int, stop: int) -> Tensor | None:
    return value if value is None or dim is None else value.narrow(dim, start, stop - start)


def _gradients(made: Tensor, given: Operands, weights: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(made, [x for x in given if x is not None], weights))


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(b.detach().abs().max())
    return bool(torch.isfinite(b).all()) and float((a - b).detach().abs().max()) <= 1e-4 * max(scale, 1e-3)
