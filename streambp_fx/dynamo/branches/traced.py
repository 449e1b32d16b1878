"""What stands in a function in the place of a branch on data (`rewriting`). Dynamo traces it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

from ...passes.graph.ops.branch import BRANCH, PREDICATE, PREDICATE_OF_SIZE

# What takes a tensor of one element for a number as an index.
CONTAINERS = (list, tuple, torch.nn.ModuleList, torch.nn.ParameterList)


def predicate(asked: Any, negated: bool) -> Tensor | None:
    """What a branch asks as a tensor without dims, bool; None if Python knows the answer.

    Args:
        asked: what is asked: a tensor of one element, or a comparison of a number of rows.
        negated: the body is run where it does not hold.
    """
    if isinstance(asked, Tensor):
        if asked.dim() > 0 and asked.numel() != 1:
            return None
        found = PREDICATE(asked)
    elif isinstance(asked, (bool, int)):
        holds = asked if isinstance(asked, bool) else asked != 0
        if guard_or_true(holds) == guard_or_false(holds):
            return None
        found = PREDICATE_OF_SIZE(torch.sym_ite(holds, 1, 0))
    else:
        return None
    return found.logical_not() if negated else found


def vector(mask: Tensor) -> Tensor:
    """A mask whose true entries a loop goes over.

    Args:
        mask: of the shape (entries,), which are always as many, and any dtype.
    """
    assert isinstance(mask, Tensor) and mask.dim() == 1
    return mask.clone()  # as it is now


def at(values: Any, place: int, as_row: bool) -> Any:
    """`values[index]` for a tensor as the index.

    Args:
        values: a tensor (entries, ...), or a container that takes it for a number.
        place: the entry.
        as_row: the index has one element, else no dims.
    """
    found = values[place]
    if isinstance(values, Tensor):  # one element makes a copy, no dims make a view
        return found.unsqueeze(0).clone() if as_row else found
    assert type(values) in CONTAINERS
    return found


def tensor(value: Any) -> Tensor:
    """A tensor of any shape and dtype, and nothing else."""
    assert isinstance(value, Tensor)
    return value


def with_dims(value: Any) -> Tensor:
    """A tensor of any shape with dims, of any dtype, and nothing else."""
    assert isinstance(value, Tensor) and value.dim() > 0
    return value


def operand(value: Any) -> Any:
    """A tensor or a number, and nothing else."""
    assert isinstance(value, (Tensor, int, float, complex))
    return value


def of_torch(*modules: Any) -> None:
    """What functions are taken for PyTorch's from are modules of it."""
    for module in modules:
        assert module is torch or module is torch.nn.functional


def counts(values: Any) -> Any:
    """Counts, (entries,), of which is only asked whether they are zero."""
    return values.clone() if isinstance(values, Tensor) and values.dim() == 1 else values.tolist()


def item(value: Any) -> Any:
    """A tensor of one element that is only compared with a number."""
    return value.reshape(()).clone() if isinstance(value, Tensor) and value.numel() == 1 else value.item()


def own(value: Tensor) -> Tensor:
    """A copy of a tensor of any shape and dtype, which the body may change in place."""
    assert isinstance(value, Tensor)
    return value.clone(memory_format=torch.preserve_format)  # which `is_own_copy` knows


def results(predicate: Tensor, taken: Any, skipped: Any, rebound: int) -> tuple[Tensor, ...]:
    """What becomes of variables.

    Args:
        predicate: what was asked.
        taken: their values after the body, tensors.
        skipped: those before, of the same shapes and dtypes.
        rebound: so many of the first ones the body gives another value; the others it changes in place.
    """
    found = []
    for new, old in zip(taken, skipped):  # noqa: B905  (Dynamo of PyTorch 2.11 traces no `strict`)
        if new is old:
            found.append(old)
            continue
        assert isinstance(new, Tensor) and isinstance(old, Tensor)
        assert new.dtype == old.dtype and new.device == old.device and new.dim() == old.dim()
        found.append(BRANCH(predicate, new, old, len(found) < rebound))
    return tuple(found)
