"""What a trace sees of memory: tensors that are alive, changes in place, and where these are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node

from .refusals import ASKS, BranchError, MutationError


@dataclass
class _Seen:
    """A tensor of the trace that is still alive, and where its memory is."""

    tensor: weakref.ref[Tensor]
    storage: int


@dataclass
class Version:
    """A tensor before an op: how often it had been changed, what autograd knew of it, and where it lay."""

    tensor: Tensor
    number: int
    requires_grad: bool
    is_leaf: bool
    place: tuple[Any, ...]

    @property
    def is_parameter(self) -> bool:
        """True for a leaf that has a gradient: autograd sees no change of it."""
        return self.requires_grad and self.is_leaf


@dataclass
class _Body:
    """The body of a branch on data while it is traced.

    Attributes:
        predicate: what the branch asks.
        outside: where the tensors lie that were there before.
        copied: of them, those that have been copied to be changed.
    """

    predicate: Node
    outside: set[int]
    copied: set[int]


class Memory:
    """What a trace has seen of memory: which tensors are alive, and what was changed in place.

    Attributes:
        changed: True if some op changed a tensor.
    """

    def __init__(self) -> None:
        self.changed = False
        self._seen: dict[int, _Seen] = {}
        self._bodies: list[_Body] = []
        self._rebound: list[Tensor] = []
        self._own: list[Tensor] = []
        self._twice: set[int] = set()

    def versions(self, values: Any) -> list[Version]:
        """The tensors among arguments of an op, as they are before it."""
        leaves = pytree.tree_leaves(values)
        own = [v for v in leaves if isinstance(v, Tensor) and not v.is_inference()]
        return [Version(v, v._version, v.requires_grad, v.is_leaf, self._place(v)) for v in own]

    def _place(self, value: Tensor) -> tuple[Any, ...]:
        """What a body must leave as it is of a tensor itself: `detach_`, `t_` and `set_` change no values."""
        if not self._bodies:
            return ()
        return value.requires_grad, value.is_leaf, value.shape, value.stride(), storage_of(value)

    def see(self, values: Any, given_back: bool = False) -> None:
        """Remember the tensors among inputs or results of an op.

        Args:
            values: them, in any containers.
            given_back: the op changes a tensor in place, and returns it.
        """
        for value in pytree.tree_leaves(values):
            if id(value) in self._seen and not given_back:
                self._twice.add(id(value))
            if isinstance(value, Tensor) and id(value) not in self._seen:
                self._seen[id(value)] = _Seen(weakref.ref(value, self._forget(id(value))), storage_of(value))

    def _forget(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._seen.pop(key, None)
            self._twice.discard(key)

        return gone

    def check(self, before: list[Version], node: Node) -> None:
        """Look at what an op did to its arguments.

        NOTE [changes that autograd does not see]: in a region without gradients, or through `detach`, a
        change in place is no op of autograd's graph: the value is another one, and its gradient is still that
        of the old value. No functional op has that gradient, so such a graph is refused.

        Raises:
            MutationError: the op changed a tensor that has a gradient, and autograd did not see it.
            BranchError: it stands in the body of a branch, and changed a tensor from outside of it.
        """
        for was in before:
            value = was.tensor
            self._check_place(was, node)
            if value._version == was.number:
                continue
            self.changed = True
            storage = storage_of(value)
            if any(storage in body.outside for body in self._bodies):
                raise BranchError(
                    f"{ASKS} to change another one in place by a name that it does not say", node
                )
            if any(storage == storage_of(v) for v in self._rebound):
                raise BranchError(f"{ASKS} which of two tensors is changed in place later", node)
            recorded = torch.is_grad_enabled() and value.requires_grad and not was.is_parameter
            others = [t for t in self._sharing(value) if not (recorded and _base(t) is _base(value))]
            begins = recorded and not was.requires_grad
            if any(t.requires_grad or begins for t in others):
                raise MutationError(
                    "a value that has a gradient is changed in place where autograd does not see it "
                    "(under no_grad, or through detach)",
                    node,
                )

    def _check_place(self, was: Version, node: Node) -> None:
        changed = was.place and was.place != self._place(was.tensor) and was.tensor._version == was.number
        if changed and any(was.place[-1] in body.outside for body in self._bodies):
            raise BranchError(f"{ASKS} to change what is known of another one", node)

    def begin_body(self, predicate: Node) -> None:
        """From here on the body of a branch runs, which must change nothing in place that is there now.

        Args:
            predicate: what the branch asks.
        """
        self._bodies.append(_Body(predicate, {seen.storage for seen in self._seen.values()}, set()))

    def read_in_body(self, before: list[Version], is_own_copy: bool, node: Node) -> None:
        """An op in the body of a branch reads tensors.

        Args:
            before: the tensors.
            is_own_copy: it makes the copy that the body changes in the place of a tensor.
            node: the op.

        Raises:
            BranchError: it reads by another name what the body changes.
        """
        for storage in (storage_of(v.tensor) for v in before) if self._bodies else ():
            if any(storage in body.copied for body in self._bodies):
                raise BranchError(f"{ASKS} to change another one in place, and reads that by two names", node)
            if is_own_copy:
                self._bodies[-1].copied.add(storage)

    def own(self, copy: Tensor) -> None:
        """A copy, of any shape and dtype, that the body of a branch changes in the place of a tensor."""
        self._own.append(copy)

    def rebind(self, values: list[Any], node: Node) -> None:
        """Of these tensors a variable is one or the other: later changes in place of either are refused.

        Raises:
            BranchError: one of them lies in the memory of a copy, and would be a view of the tensor itself.
                Or an op has returned it that was given it.
        """
        found = [v for v in values if isinstance(v, Tensor)]
        if {storage_of(v) for v in self._own} & {storage_of(v) for v in found}:
            raise BranchError(f"{ASKS} to make a view of what it changes in place", node)
        if any(id(v) in self._twice for v in found):
            raise BranchError(f"{ASKS} to take another tensor, or one that has two names", node)
        self._rebound += found

    def end_body(self, predicate: Node) -> None:
        """The body of the branch is done, and so are those within it."""
        known = [k for k, body in enumerate(self._bodies) if body.predicate is predicate]
        del self._bodies[known[0] if known else len(self._bodies) :]

    def _sharing(self, value: Tensor) -> list[Tensor]:
        storage = storage_of(value)
        found = (seen.tensor() for seen in self._seen.values() if seen.storage == storage)
        return [value, *(t for t in found if t is not None)]

    def synchronize(self) -> None:
        """Bring all names of changed values up to date.

        Done where gradients are switched on or off: functionalization would otherwise make a view anew at its
        next use, and an op belongs to the region in which it is recorded.
        """
        for seen in list(self._seen.values()):
            value = seen.tensor()
            if isinstance(value, FunctionalTensor):
                torch._sync(value)


def _base(value: Tensor) -> Tensor:
    """What autograd takes a tensor to be a view of; the tensor itself if it is none."""
    return value._base if value._is_view() and value._base is not None else value


def storage_of(value: Tensor) -> int:
    """What tells where a tensor of any shape and dtype lies: equal for those that share memory."""
    return value.untyped_storage()._cdata if not isinstance(value, FunctionalTensor) else id(value)
