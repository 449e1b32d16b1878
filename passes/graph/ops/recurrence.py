"""A recurrence along the sequence as one op: `streambp_fx::recurrence`.

Models call a function for it (a gated delta rule, a state space) that goes over the rows block by block. Its
loop would be unrolled when a model is captured, and fix the length. So the call is captured as it is: one op,
which says by name what is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from ..tracing import without_saved_tensors_hooks

# The operands of a recurrence by position, its plain arguments, and the state that it begins with
# (None: zeros), to its rows and the state that it ends with.
RunRecurrence = Callable[[Sequence[Tensor | None], Sequence[float], Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recurrence:
    """What is known of a function that goes along the sequence with a state.

    Attributes:
        name: by which the op refers to it.
        step: calls it.
        dims: of each operand, the dim of its rows; None: it has none, as a parameter.
        rows: the dim of the rows of what it makes.
        like: the operand that has the sizes of what it makes.
        state: the sizes of the state, each as the size of an operand in a dim.
        sizes: those of what it makes, from the operands, where no operand has them.
        state_sizes: the sizes of the state, from the operands, where `state` cannot say them.
        by_row: it goes from row to row, and not by blocks.
    """

    name: str
    step: RunRecurrence = field(compare=False, repr=False)
    dims: tuple[int | None, ...]
    rows: int
    like: int
    state: tuple[tuple[int, int], ...] = ()
    sizes: Callable[[Sequence[Any]], list[Any]] | None = field(default=None, compare=False, repr=False)
    state_sizes: Callable[[Sequence[Any]], list[Any]] | None = field(default=None, compare=False, repr=False)
    by_row: bool = False

    def sizes_of(self, operands: Sequence[Any]) -> list[Any]:
        """The sizes of what it makes, for operands of which only shapes are looked at."""
        return list(operands[self.like].shape) if self.sizes is None else self.sizes(operands)

    def state_sizes_of(self, operands: Sequence[Any]) -> list[Any]:
        """The sizes of the state, for operands of which only shapes are looked at."""
        if self.state_sizes is not None:
            return self.state_sizes(operands)
        return [operands[k].shape[dim] for k, dim in self.state]

    def dtypes(
        self,
        operands: Sequence[Tensor | None],
        settings: Sequence[float],
        cast: torch.dtype | None,
    ) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of what it makes and of its state, for operands of any shape and device."""
        given = tuple(
            x if x is None else (self._few(x, dim), x.dtype, x.device.type)
            for x, dim in zip(operands, self.dims, strict=True)
        )
        return _dtypes(self.step, given, tuple(settings), cast)

    @staticmethod
    def _few(operand: Tensor, dim: int | None) -> tuple[int, ...]:
        """Sizes of an operand with two rows and, where a size is a symbol, with two of that."""
        few = (d == dim or isinstance(s, torch.SymInt) for d, s in enumerate(operand.shape))
        return tuple(2 if small else int(s) for small, s in zip(few, operand.shape, strict=True))


@functools.cache
def _dtypes(
    step: RunRecurrence,
    given: tuple[tuple[tuple[int, ...], torch.dtype, str] | None, ...],
    settings: tuple[float, ...],
    cast: torch.dtype | None,
) -> tuple[torch.dtype, torch.dtype]:
    """On fake tensors: autocast leaves those of the meta device alone."""
    device = next(x[2] for x in given if x is not None).replace("meta", "cpu")
    with (
        _disable_current_modes(),
        FakeTensorMode(),
        torch.no_grad(),
        torch.autocast(device, cast, cast is not None),
    ):
        operands = [x if x is None else torch.empty(x[0], dtype=x[1], device=device) for x in given]
        made, last = step(operands, settings, None)
    return made.dtype, last.dtype


#: By name. What is not here is not captured as a recurrence, but as what it does.
RECURRENCES: dict[str, Recurrence] = {}

_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, f"Autograd{n}") for n in ("CPU", "CUDA", "Other", "Functionality")
]
_AUTOGRAD_KEYS.append(torch._C.DispatchKey.ADInplaceOrView)

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define("recurrence(str name, Tensor?[] operands, float[] settings, ScalarType? cast) -> Tensor")
_LIBRARY.define("recurrence_last(str name, Tensor?[] operands, float[] settings, ScalarType? cast) -> Tensor")
_LIBRARY.define(
    "recurrence_step(str name, Tensor?[] operands, float[] settings, ScalarType? cast, Tensor state) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrence_vjp(str name, Tensor?[] operands, float[] settings, ScalarType? cast, Tensor? state, "
    "Tensor? gradient, Tensor? last_gradient, bool[] wanted) -> Tensor[]"
)
_LIBRARY.define(
    "recurrence_kept(str name, Tensor?[] operands, float[] settings, ScalarType? cast, Tensor state, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrence_kept_vjp(str name, Tensor?[] operands, float[] settings, ScalarType? cast, Tensor state, "
    "Tensor gradient, Tensor last_gradient, bool[] wanted, Tensor kept) -> Tensor[]"
)
RECURRENCE = torch.ops.streambp_fx.recurrence.default
RECURRENCE_LAST = torch.ops.streambp_fx.recurrence_last.default
RECURRENCE_STEP = torch.ops.streambp_fx.recurrence_step.default
RECURRENCE_VJP = torch.ops.streambp_fx.recurrence_vjp.default
RECURRENCE_KEPT = torch.ops.streambp_fx.recurrence_kept.default
RECURRENCE_KEPT_VJP = torch.ops.streambp_fx.recurrence_kept_vjp.default


def _whole(
    name: str, operands: Sequence[Tensor | None], settings: Sequence[float], cast: torch.dtype | None
) -> Tensor:
    with torch.no_grad():
        return _call(name, operands, settings, cast, None)[0].contiguous()


def _last(
    name: str, operands: Sequence[Tensor | None], settings: Sequence[float], cast: torch.dtype | None
) -> Tensor:
    """The state after all rows."""
    with torch.no_grad():
        return _call(name, operands, settings, cast, None)[1].clone(memory_format=torch.contiguous_format)


def _call(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    device = next(x.device for x in operands if x is not None).type
    with torch.autocast("cpu" if device == "meta" else device, cast, cast is not None):
        return RECURRENCES[name].step(operands, settings, state)


def _step(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        made, last = _call(name, operands, settings, cast, state)
    return made.contiguous(), last.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def autograd_in_kernel() -> Iterator[None]:
    """Within: ops are recorded by autograd also where the kernel was called from below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _vjp(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor | None,
    gradient: Tensor | None,
    last_gradient: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of the operands that are wanted, in their order, then that of a state that is given."""
    with torch.enable_grad(), autograd_in_kernel():
        leaves = [
            x if x is None else x.detach().requires_grad_(w) for x, w in zip(operands, wanted, strict=True)
        ]
        before = None if state is None else state.detach().requires_grad_()
        made, last = _call(name, leaves, settings, cast, before)
    asked = [x for x in (*leaves, before) if x is not None and x.requires_grad]
    pairs = [(made, gradient), (last, last_gradient)]
    pairs = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in asked]
    results, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(results, asked, gradients, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(asked, found, strict=True)]


@dataclass
class _Graph:
    """What autograd has recorded of a step: what is differentiated, and where that begins."""

    leaves: list[Tensor]
    made: Any
    last: Any


def _step_kept(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """A step that autograd records, for `recurrence_kept_vjp`, to which the same operands are given again.

    NOTE [a recorded step]: the record is an attribute of a third result, which has no elements. So a program
    hands it on like any other value, and it goes when that value does. It refers to the operands' memory by
    aliases with version counters of their own: nobody writes over an operand, as the other op reads it, but
    next to a state in the same buffer the state after it is written. What is returned is a copy, since later
    ops may write over it and the record may need it.
    """
    with torch.enable_grad(), autograd_in_kernel(), without_saved_tensors_hooks():
        leaves = [x if x is None else x.data.requires_grad_(w) for x, w in zip(operands, wanted, strict=True)]
        before = state.data.requires_grad_()
        made, last = _call(name, leaves, settings, cast, before)
        edges = [get_gradient_edge(y) if y.requires_grad else None for y in (made, last)]
    kept = torch.empty(0, dtype=torch.uint8, device=state.device)
    kept.record = _Graph([x for x in (*leaves, before) if x is not None and x.requires_grad], *edges)  # type: ignore[attr-defined]
    copies = (y.detach().clone(memory_format=torch.contiguous_format) for y in (made, last))
    return (*copies, kept)  # type: ignore[return-value]


def _kept_vjp(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor,
    gradient: Tensor,
    last_gradient: Tensor,
    wanted: Sequence[bool],
    kept: Tensor,
) -> list[Tensor]:
    """As `recurrence_vjp`, from the record of the step."""
    record, kept.record = kept.record, None  # type: ignore[attr-defined]
    pairs = [(e, g) for e, g in ((record.made, gradient), (record.last, last_gradient)) if e is not None]
    if not pairs:  # one row, which is the first and reads nothing that has a gradient
        return [torch.zeros_like(x) for x in record.leaves]
    ends, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(ends, record.leaves, gradients, allow_unused=True)
    pairs = list(zip(record.leaves, found, strict=True))
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in pairs]


def _fake_whole(
    name: str, operands: Sequence[Tensor | None], settings: Sequence[float], cast: torch.dtype | None
) -> Tensor:
    known = RECURRENCES[name]
    return _empty(known, operands, known.sizes_of(operands), known.dtypes(operands, settings, cast)[0])


def _fake_last(
    name: str, operands: Sequence[Tensor | None], settings: Sequence[float], cast: torch.dtype | None
) -> Tensor:
    known = RECURRENCES[name]
    return _empty(known, operands, known.state_sizes_of(operands), known.dtypes(operands, settings, cast)[1])


def _empty(
    known: Recurrence, operands: Sequence[Tensor | None], sizes: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    like = operands[known.like]
    assert like is not None
    return like.new_empty(sizes, dtype=dtype)


def _fake_step(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    return _fake_whole(name, operands, settings, cast), torch.empty_like(
        state, memory_format=torch.contiguous_format
    )


def _fake_vjp(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor | None,
    gradient: Tensor | None,
    last_gradient: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    asked = [x for x, w in zip(operands, wanted, strict=True) if w and x is not None]
    like = [*asked, *([] if state is None else [state])]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


def _fake_kept(
    name: str,
    operands: Sequence[Tensor | None],
    settings: Sequence[float],
    cast: torch.dtype | None,
    state: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    made, last = _fake_step(name, operands, settings, cast, state)
    return made, last, state.new_empty(0, dtype=torch.uint8)


def _fake_kept_vjp(*given: Any) -> list[Tensor]:
    return _fake_vjp(*given[:-1])


class _Whole(torch.autograd.Function):
    """The derivative of the op, or of `recurrence_last`, where a graph is not streamed."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        name: str,
        settings: Sequence[float],
        cast: torch.dtype | None,
        *operands: Tensor | None,
    ) -> Tensor:
        ctx.known = op, name, settings, cast
        ctx.save_for_backward(*operands)
        with torch._C._AutoDispatchBelowAutograd():
            return op(name, operands, settings, cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operands, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[4:])
        op, name, settings, cast = ctx.known
        gradients = (gradient, None) if op is RECURRENCE else (None, gradient)
        found = iter(RECURRENCE_VJP(name, operands, settings, cast, None, *gradients, wanted))
        return None, None, None, None, *(next(found) if w else None for w in wanted)


def _autograd(
    op: Any, name: str, operands: Sequence[Tensor | None], settings: Sequence[float], cast: torch.dtype | None
) -> Tensor:
    return _Whole.apply(op, name, settings, cast, *operands)


#: What the ops do, by op.
KERNELS: dict[Any, Callable[..., Any]] = {
    RECURRENCE: _whole,
    RECURRENCE_STEP: _step,
    RECURRENCE_VJP: _vjp,
    RECURRENCE_KEPT: _step_kept,
    RECURRENCE_KEPT_VJP: _kept_vjp,
}
_LIBRARY.impl("recurrence", _whole, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrence", functools.partial(_autograd, RECURRENCE), "Autograd")
_LIBRARY.impl("recurrence_last", _last, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrence_last", functools.partial(_autograd, RECURRENCE_LAST), "Autograd")
_LIBRARY.impl("recurrence_step", _step, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrence_vjp", _vjp, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrence_kept", _step_kept, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrence_kept_vjp", _kept_vjp, "CompositeExplicitAutograd")
torch.library.register_fake("streambp_fx::recurrence", _fake_whole, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::recurrence_last", _fake_last, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::recurrence_step", _fake_step, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::recurrence_vjp", _fake_vjp, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::recurrence_kept", _fake_kept, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::recurrence_kept_vjp", _fake_kept_vjp, lib=_LIBRARY)
