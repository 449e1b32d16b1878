"""Outputs that are computed when somebody reads them.

NOTE [lazy outputs]: a model returns its logits next to its loss, and hardly anybody reads them. `LazyTensor`
stands for them: it knows shape, dtype and device, and any other use computes the value, once. It is a node of
the autograd graph, so a gradient that reaches it, by whatever way, goes on to what the value is made of. That
holds also where the first use was without gradients (a metric): the value is kept with its gradient.

NOTE [reading in order]: whoever is given the value may change it in place. A cast that was asked for before
is of the value before, so what is derived from a lazy tensor is computed before the value is handed out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..passes.graph.subgraph import Subgraph
from .segments.owned_buffers import changing_memory
from .segments.unchunked_segment import UnchunkedSegment
from .several_devices.sharded_parameters import StoredAfterStep

CHANGED = (
    "these logits are computed when they are read, and the weights that they are made of have been changed "
    "since the step (by an optimizer?). Read them before that, or keep them: "
    'torch.compile(..., options={"logits": "keep"}).'
)
OF_THE_LOSS = (
    "these logits are computed when they are read, and the loss is made without them: their gradient is not "
    'that of the loss. Keep them to have it: torch.compile(..., options={"logits": "keep"}).'
)
# What asks for a gradient that goes through the value, not from it.
GRADIENTS = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}
# What can be told without the value. Getters of attributes come as their `__get__`.
KNOWN = {
    *(getattr(Tensor, n).__get__ for n in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "output_nr",
        "_backward_hooks", "_base",
    )),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__, Tensor.get_device,
    Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset, Tensor.register_hook, Tensor.retain_grad,
    Tensor.is_signed,
}  # fmt: skip
# Ops that give another lazy tensor: what trainers do with every output, whether they read it or not.
CASTS = {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.to}


class LazyTensor(torch.Tensor):
    """A tensor whose value is computed at its first use. See NOTE [lazy outputs]."""

    _compute: Callable[[], Tensor] | None
    _value: Tensor | None
    _source: LazyTensor | None  # whose memory the value shares
    _derived: list[weakref.ref[LazyTensor]]
    of_the_loss = False

    @staticmethod
    def make(compute: Callable[[], Tensor], like: Like) -> LazyTensor:
        """A lazy tensor with the shape, strides, dtype and device of `like`."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            LazyTensor, like.shape, like.strides, dtype=like.dtype, device=like.device, requires_grad=False
        )
        made._compute, made._value, made._source, made._derived = compute, None, None, []
        return made

    def read(self) -> Tensor:
        """The value: an ordinary tensor of the same shape and dtype, whose gradient goes through this one.

        See NOTE [reading in order].
        """
        value = self.computed()
        (source, self._source), (derived, self._derived) = (self._source, None), (self._derived, [])
        for lazy in (source, *(reference() for reference in derived)):
            if lazy is not None:
                lazy.read()
        return value

    def computed(self) -> Tensor:
        """The value, of the same shape, dtype and device, for those who do not change it."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._value is None:
                assert self._compute is not None
                compute = self._compute
                with torch.inference_mode(False), torch.enable_grad():
                    self._value = _Read.apply(self, compute) if self.requires_grad else compute()
                self._compute = None
            return self._value

    def remember(self, lazy: LazyTensor) -> LazyTensor:
        """Note that another lazy tensor is made of this one."""
        self._derived.append(weakref.ref(lazy))
        return lazy

    def detached(self) -> LazyTensor:
        """A lazy tensor of the same value without a gradient, which shares its memory once it is computed."""
        made = LazyTensor.make(lambda: self.computed().detach(), Like.of(self))
        made._source = self
        return self.remember(made)

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hooked = func is Tensor.register_hook and _is_of_an_engine(args[1:], kwargs)
        asked = (args[1:], kwargs) if func is torch.autograd.grad else args
        if func in GRADIENTS and not hooked and _is_of_the_loss(asked):
            raise RuntimeError(OF_THE_LOSS)
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.detach and args[0]._value is None:
            return args[0].detached()
        if func in CASTS and isinstance(args[0], LazyTensor) and args[0]._value is None:
            return _cast(func, args, kwargs)
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Uses that do not come from Python. Autograd has seen them already."""
        read = lambda x: x.read().detach()  # noqa: E731
        args, kwargs = tree_map_only(LazyTensor, read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_of_the_loss(values: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(v, LazyTensor) and v.of_the_loss for v in leaves)


def _is_of_an_engine(args: Any, kwargs: Any) -> bool:
    """True for a hook that gathers parameters before a backward, and has no use for the gradient."""
    hooks = (*args, *kwargs.values())
    return all(str(getattr(h, "__module__", "")).startswith("torch.distributed.") for h in hooks)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Another one where a tensor was changed in place, or was given other memory."""
    return tensor._version, tensor.untyped_storage()._cdata


def _shares_memory(value: Tensor, others: list[Tensor]) -> bool:
    return value.untyped_storage()._cdata in {v.untyped_storage()._cdata for v in others}


class _Read(torch.autograd.Function):
    """The value of a lazy tensor; its gradient is the lazy tensor's."""

    @staticmethod
    def forward(ctx: Any, lazy: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        value = compute()
        return value.clone() if value._is_view() else value  # views cannot be changed in place

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gradient, None


class _Cast(torch.autograd.Function):
    """A lazy tensor of another dtype or device, still lazy."""

    @staticmethod
    def forward(ctx: Any, source: LazyTensor, function: Callable[[Tensor], Tensor], like: Like) -> Tensor:
        ctx.dtype, ctx.device = source.dtype, source.device
        return LazyTensor.make(lambda: function(source.computed().detach()), like)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gradient.to(ctx.device, ctx.dtype), None, None


def _cast(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    source = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        moved = torch.empty(0, dtype=source.dtype, device=source.device)
        result = func(moved, *args[1:], **kwargs)
        if not isinstance(result, Tensor):  # Tensor.type() without an argument
            return result
        if result is moved:
            return source
        like = Like(source.shape, source.stride(), result.dtype, result.device)
        return source.remember(_Cast.apply(source, lambda value: func(value, *args[1:], **kwargs), like))


@dataclass(frozen=True)
class Like:
    """What is known of a tensor that is not computed; the strides are in elements."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Shape, strides, dtype and device of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Anew:
    """How to make what a lazy output reads where the step did not run all of it
    (`runtime.segments.step_blocks`).

    Attributes:
        inputs: of the step; they must not have been changed since.
        make: runs the rest.
        check: raises if gradients of what is read belong to rows that were not run.
    """

    inputs: list[Tensor]
    make: Callable[[], list[Any]]
    check: Callable[[list[Tensor | None]], None]


class LazyOutput(torch.autograd.Function):
    """An output of the graph that is not computed. Backward recomputes what a gradient needs."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Subgraph,
        like: Like,
        anew: Anew | None,
        stored: StoredAfterStep | None,
        *inputs: Any,
    ) -> Tensor:
        """A lazy tensor like this one, which is computed from `inputs` when it is read.

        Args:
            stored: parameters that need not be there then.
        """
        detached = tuple(_detached(v) if isinstance(v, Tensor) else v for v in inputs)
        UnchunkedSegment.remember(ctx, part.module, False, inputs)
        ctx.anew, ctx.stored = anew, stored
        read = [v for v in detached if isinstance(v, Tensor)] if anew is None else anew.inputs
        versions, of_stored = [_version(v) for v in read], _version_stored(stored)

        def compute() -> Tensor:
            if versions != [_version(v) for v in read] or of_stored != _version_stored(stored):
                raise RuntimeError(CHANGED)
            with torch.no_grad(), _gathered(stored):
                value = part.module(*(detached if anew is None else anew.make()))[0]
            return value.clone() if _shares_memory(value, read) else value  # it may be changed in place

        return LazyTensor.make(compute, like)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        """Gradients of `inputs`; the part of the graph is run again for them."""
        found = UnchunkedSegment.pull_back(ctx, 4, (gradient,))
        if ctx.anew is not None:
            ctx.anew.check(found)
        return (None, None, None, None, *found)


def _detached(tensor: Tensor) -> Tensor:
    return tensor if tensor in changing_memory else tensor.detach()


def _gathered(stored: StoredAfterStep | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if stored is None else stored.gathered()


def _version_stored(stored: StoredAfterStep | None) -> Hashable:
    return None if stored is None else stored.version()
