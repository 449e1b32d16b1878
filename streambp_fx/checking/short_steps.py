"""One short step of a graph, and how far two of them are from one another."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from ..passes.graph.tracing import without_saved_tensors_hooks
from .gradient_sketch import Sketch, sketch

Call = Callable[..., Any]
# Cotangents of float16 outputs, so that small gradients do not vanish.
HALF_SCALE = 1024.0
# Cotangent of a number: another one than that of `loss.backward()`, which hides what a factor is left out of.
OF_A_NUMBER = 0.75
# Share of the norm of the whole gradient below which that of an input is no scale of its own.
VANISHING = 1e-3


@dataclass
class Outcome:
    """What a short step gives.

    Attributes:
        outputs: by position, detached; None where they are not looked at.
        roots: positions of the outputs that were differentiated.
        differentiable: positions of those that can be.
        gradients: by position of the input; None where autograd gives none.
        of_outputs: gradients of outputs, by position, where autograd has one: an output of which others are
            made has what comes from all of them.
        read: positions of outputs that are computed when they are read, of which nothing else is made.
        buffers: inputs that the step has changed, by position; of those that no step changes as well, as far
            as PyTorch counts it.
        whole: gradients that were wanted as they are, by position of the input.
        value: the sum of what was differentiated, weighted with the cotangents.
        held: positions of inputs whose gradient's memory somebody holds after the step, who was not given it.
    """

    outputs: list[Any] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    differentiable: set[int] = field(default_factory=set)
    gradients: dict[int, Sketch | None] = field(default_factory=dict)
    of_outputs: dict[int, Sketch | None] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Tensor] = field(default_factory=dict)
    value: float = 0.0
    held: set[int] = field(default_factory=set)

    @property
    def total(self) -> float:
        """Norm of all gradients together."""
        return math.sqrt(sum(s.norm**2 for s in self.gradients.values() if s is not None))

    @property
    def usable(self) -> bool:
        """True if there is something finite to compare with."""
        roots = (self.outputs[k] for k in self.roots)
        finite = all(bool(v.isfinite()) for v in roots if v.dim() == 0)
        return finite and math.isfinite(self.total) and self.total > 0


def run(
    call: Call,
    inputs: Sequence[Any],
    fixed: Collection[int] = (),
    skipped: Collection[int] = (),
    constant: Collection[int] = (),
    wanted: Collection[int] | None = None,
) -> Outcome:
    """Run a step, forward and backward, and reduce its gradients as they come.

    Args:
        call: takes the inputs; returns the outputs.
        inputs: of the short step; they are left as they are.
        fixed: positions of those that no step changes, of which no copy is made.
        skipped: positions of outputs that are not looked at.
        constant: positions of outputs that are not differentiated.
        wanted: positions of the inputs whose gradients are kept as they are; None: of none. If it is empty
            there is no backward.
    """
    found, given = Outcome(), [_own(v, k in fixed) for k, v in enumerate(inputs)]
    leaves = {k: v for k, v in enumerate(given) if isinstance(v, Tensor) and v.requires_grad}
    versions = {k: _version(given[k]) for k in fixed}
    if isinstance(call, GraphModule):  # whose call prints a traceback where an op fails, as on too few rows
        _LazyGraphModule.force_recompile(call)
        call = call.forward
    memory: dict[int, StorageWeakRef] = {}
    with without_saved_tensors_hooks(), torch.enable_grad(), _reduced(leaves, found, wanted or (), memory):
        results = list(call(*given))
        roots, cotangents = [], []
        for position, result in enumerate(results):
            if not isinstance(result, Tensor) or position in skipped:
                found.outputs.append(None if position in skipped else result)
                continue
            value = result.read() if hasattr(result, "read") else result
            found.read |= {position} if value is not result else set()
            found.outputs.append(value.detach())
            if value.grad_fn is not None:
                _note_gradient(value, position, found)
            found.differentiable |= {position} if value.requires_grad else set()
            if value.requires_grad and position not in constant:
                roots.append(get_gradient_edge(value))
                found.roots.append(position)
                cotangents.append(_cotangent(value, position))
                found.value += _product(value, cotangents[-1])
        results.clear()
        if roots and (wanted is None or wanted):
            # Edges and not tensors: for those a mode for torch functions would be off in the backward. And
            # without autocast: the step may be called under it, and its backward usually is not.
            with torch._C._DisableAutocast():
                torch.autograd.backward(roots, cotangents)
    result = value = None  # of the last output
    roots.clear()
    found.held = _still_held(memory, wanted or ())
    for position, (before, after) in enumerate(zip(inputs, given, strict=True)):
        if not isinstance(before, Tensor):
            continue
        same = torch.equal(before, after) if position not in fixed else versions[position] == _version(after)
        if not same:
            found.buffers[position] = after.detach()
    return found


def _note_gradient(value: Tensor, position: int, found: Outcome) -> None:
    """Have the gradient of an output noted when it comes."""

    def note(gradient: Tensor | None) -> None:
        found.of_outputs[position] = None if gradient is None else sketch(gradient, position)

    value.register_hook(note)


def _own(value: Any, fixed: bool) -> Any:
    """A leaf of its own that shares memory, or a copy of what a step may change."""
    if not isinstance(value, Tensor):
        return value
    own = value.detach() if fixed else value.detach().clone()
    return own.requires_grad_(value.requires_grad)


def _still_held(memory: dict[int, StorageWeakRef], wanted: Collection[int]) -> set[int]:
    """Those whose memory is not free."""
    for collect in (False, True):
        if collect:
            gc.collect()
        held = {k for k, storage in memory.items() if k not in wanted and not storage.expired()}
        if not held:
            break
    return held


def _version(value: Any) -> int | None:
    """How often a tensor was changed in place, which one that shares its memory knows as well."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


@contextlib.contextmanager
def _reduced(
    leaves: dict[int, Tensor], found: Outcome, wanted: Collection[int], memory: dict[int, StorageWeakRef]
) -> Iterator[None]:
    """Within: a gradient that has come is reduced and dropped; where it lay is noted in `memory`."""

    def reduce(position: int, leaf: Tensor) -> None:
        if leaf.grad is None:
            return  # the hook is called as well where a step says that there is no gradient
        found.gradients[position] = sketch(leaf.grad, position)
        if leaf.grad.layout is torch.strided:
            memory[position] = StorageWeakRef(leaf.grad.untyped_storage())
        if position in wanted:
            found.whole[position] = leaf.grad
        leaf.grad = None

    found.gradients.update(dict.fromkeys(leaves))
    handles = [
        leaf.register_post_accumulate_grad_hook(lambda t, k=position: reduce(k, t))
        for position, leaf in leaves.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _product(value: Tensor, cotangent: Tensor) -> float:
    """The real part of the sum of products."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return float((value.to(wide) * cotangent.to(wide).conj()).sum().real)


def _cotangent(value: Tensor, position: int) -> Tensor:
    """Of an output: the same for each number, random for more."""
    scale = HALF_SCALE if value.dtype == torch.float16 else 1.0
    if value.dim() == 0 and not value.is_complex():
        return torch.full_like(value, OF_A_NUMBER * scale)
    generator = torch.Generator().manual_seed(position)
    wide = torch.complex128 if value.is_complex() else torch.float64
    drawn = torch.randn(value.shape, generator=generator, dtype=wide, device="cpu")
    return (drawn * scale / math.sqrt(max(1, value.numel()))).to(value.device, value.dtype)


@dataclass(frozen=True)
class Difference:
    """Of two steps.

    Attributes:
        what: "output 0", "input 0", or the gradient of one.
        position: of the output or of the input.
        is_gradient: it is a gradient.
        gap: norm of the difference; infinite where one side has no value or another shape.
        scale: norm of what it is compared with.
        words: what differs, where it is not the values.
    """

    what: str
    position: int
    is_gradient: bool
    gap: float
    scale: float
    words: str = ""

    @property
    def key(self) -> tuple[bool, str]:
        """Tells one comparison from another."""
        return self.is_gradient, self.what

    def relative(self, floor: float) -> float:
        """The gap, relative to the norm; that of a gradient counts as no less than `floor`."""
        scale = max(self.scale, floor if self.is_gradient else 0.0)
        return 0.0 if not self.gap else self.gap / scale if scale else math.inf


def differences(expected: Outcome, found: Outcome) -> Iterator[Difference]:
    """All comparisons, those that are equal among them: outputs, gradients, buffers."""
    for position, (a, b) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if isinstance(a, Tensor) or isinstance(b, Tensor) or (isinstance(a, int | float) and a != b):
                words = f"is {_kind(a)} in eager, {_kind(b)} when streamed"
                yield Difference(f"output {position}", position, False, math.inf, 0.0, words)
            continue
        here, there = (position in side.differentiable for side in (expected, found))
        if here is not there:
            words = f"has a gradient {'in eager' if here else 'when streamed'} alone"
            yield Difference(f"output {position}", position, False, math.inf, 0.0, words)
        yield _of_values(f"output {position}", position, a, b)
    for position, sketched in expected.gradients.items():
        yield _of_gradients(f"input {position}", position, sketched, found.gradients.get(position))
    for position in sorted(
        (expected.of_outputs.keys() | found.of_outputs.keys()) - expected.read - found.read
    ):
        one, other = (side.of_outputs.get(position) for side in (expected, found))
        yield _of_gradients(f"output {position}", position, one, other)
    for position in found.held - expected.held:
        words = "its memory is held by somebody after the step"
        yield Difference(f"gradient of input {position}", position, True, math.inf, 0.0, words)
    for position in expected.buffers.keys() | found.buffers.keys():
        a, b = (side.buffers.get(position) for side in (expected, found))
        if a is None or b is None:
            words = "changed only when streamed" if a is None else "changed only in eager"
            yield Difference(f"input {position}", position, False, math.inf, 0.0, words)
        else:
            yield _of_values(f"input {position}", position, a, b)


def _of_gradients(of: str, position: int, expected: Sketch | None, found: Sketch | None) -> Difference:
    what, words = f"gradient of {of}", ""
    if expected is None and found is None:
        return Difference(what, position, True, 0.0, 0.0)
    if expected is None or found is None:
        words = "None in eager" if expected is None else "None when streamed"
    elif expected.sparse != found.sparse:
        words = "sparse in one and dense in the other"
    else:
        return Difference(what, position, True, expected.distance(found), expected.norm)
    return Difference(what, position, True, math.inf, 0.0, words)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _of_values(what: str, position: int, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape or a.dtype != b.dtype:
        words = f"{tuple(a.shape)} {a.dtype} in eager, {tuple(b.shape)} {b.dtype} when streamed"
        return Difference(what, position, False, math.inf, 0.0, words)
    if not (a.is_floating_point() or a.is_complex()):
        return Difference(what, position, False, 0.0 if torch.equal(a, b) else math.inf, 0.0)
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    infinite = ~(a.isfinite() & b.isfinite())
    if bool(infinite.any()):  # in the same places, and of the same kind
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool(same[infinite].all()):
            return Difference(what, position, False, math.inf, 0.0, "is finite in one, or of another sign")
        a, b = a.masked_fill(infinite, 0.0), b.masked_fill(infinite, 0.0)
    gap, norm = (float(torch.linalg.vector_norm(v)) for v in (a - b, a))
    return Difference(what, position, False, gap if math.isfinite(gap) else math.inf, norm)
