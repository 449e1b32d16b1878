"""Rows that are selected by values, worked on and put back: one op, which each chunk runs by itself.

NOTE [selected rows]: `torch.where(mask)` has as many results as the mask has true entries, which no symbol of
the sequence says. What is made of them, up to where it is put among rows again, is a `RowSelection`: one
node, of rows to rows, whose ops run as PyTorch runs them, and whose gradient is that of autograd. So no other
pass meets a size that depends on values. In a chunk program it is one op, and its backward runs it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..autograd_functions import content_of
from ..functionalization import in_memory_of_their_own
from .recurrence import autograd_in_kernel

_count = itertools.count()
# The graphs that programs have a number for; those that do the same are one.
_graphs: list[GraphModule] = []
_numbers: dict[str, int] = {}

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define("selected_rows(int graph, int like, Tensor[] operands) -> Tensor")
_LIBRARY.define("selected_rows_vjp(int graph, int[] wanted, Tensor[] operands, Tensor gradient) -> Tensor[]")


class RowSelection:
    """A part of a graph that selects rows by their values, as a callable that autograd can differentiate.

    Args:
        module: takes the operands, tensors; returns one tensor.
        like: the number of the operand that the result has the shape, the dtype and the device of.

    Attributes:
        content: the same for selections that do the same.
        given: the numbers of the operands to which a gradient comes; all, as long as nobody has asked.
        draws: it draws random numbers: never.
    """

    draws = False

    def __init__(self, module: GraphModule, like: int) -> None:
        self.module, self.like = module, like
        self.given: Collection[int] | None = None
        self.content = repr((content_of(module), like))
        self.number = _numbers.setdefault(self.content, len(_graphs))
        if self.number == len(_graphs):
            _graphs.append(module)
        self.__name__ = self.__qualname__ = f"row_selection_{next(_count)}"
        self.__module__ = __name__

    def __call__(self, *operands: Tensor) -> Tensor:
        number, like, given = self.number, self.like, self.given
        own = [v if given is None or k in given else v.detach() for k, v in enumerate(operands)]

        class Apply(torch.autograd.Function):
            @staticmethod
            def forward(*given: Tensor) -> Tensor:
                return torch.ops.streambp_fx.selected_rows(number, like, given)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                wanted = [k for k, needed in enumerate(ctx.needs_input_grad) if needed]
                found = torch.ops.streambp_fx.selected_rows_vjp(number, wanted, ctx.saved_tensors, gradient)
                by_place = dict(zip(wanted, found, strict=True))
                return tuple(by_place.get(k) for k in range(len(ctx.needs_input_grad)))

        return Apply.apply(*own)


def rows_of(run: Callable[..., Tensor], operands: Sequence[Tensor]) -> Tensor:
    """The result of a selection whose ops a function runs, of the shape and dtype of one of its operands."""
    return in_memory_of_their_own([run(*operands)], operands)[0]


def _rows(graph: int, like: int, operands: Sequence[Tensor]) -> Tensor:
    return rows_of(_graphs[graph].forward, operands)


def _fake_rows(graph: int, like: int, operands: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(operands[like], memory_format=torch.contiguous_format)


def gradients_of(
    run: Callable[..., Tensor], wanted: Sequence[int], operands: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """The gradient of each wanted operand, in its shape and dtype, contiguous.

    Args:
        run: runs the ops of the selection.
        wanted: numbers of operands.
        operands: of any shapes.
        gradient: of the result, in its shape and dtype.
    """
    with autograd_in_kernel(), torch.enable_grad():
        given = [t.detach().requires_grad_(k in wanted) for k, t in enumerate(operands)]
        output = run(*given)
        leaves = [given[k] for k in wanted]
        found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
    values = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return in_memory_of_their_own(values, (gradient, *operands))


def _vjp(graph: int, wanted: Sequence[int], operands: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    return gradients_of(_graphs[graph].forward, wanted, operands, gradient)


def _fake_vjp(
    graph: int, wanted: Sequence[int], operands: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    return [torch.empty_like(operands[k], memory_format=torch.contiguous_format) for k in wanted]


_LIBRARY.impl("selected_rows", _rows, "CompositeExplicitAutograd")
_LIBRARY.impl("selected_rows_vjp", _vjp, "CompositeExplicitAutograd")
torch.library.register_fake("streambp_fx::selected_rows", _fake_rows, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::selected_rows_vjp", _fake_vjp, lib=_LIBRARY)
SELECTED_ROWS = torch.ops.streambp_fx.selected_rows.default
SELECTED_ROWS_VJP = torch.ops.streambp_fx.selected_rows_vjp.default
#: The Python functions that the ops run.
SELECTIONS: dict[Any, Callable[..., Any]] = {SELECTED_ROWS: _rows, SELECTED_ROWS_VJP: _vjp}


def graph_of(number: int) -> GraphModule:
    """The ops of a selection, by the number that its ops have."""
    return _graphs[number]
