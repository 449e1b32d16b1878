"""Groups of parameters in pieces: what an engine has to offer, and the groups of a model."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ...passes.several_devices import Buckets


class NotSupported(Exception):
    """A setting of an engine that a streamed step cannot keep; says which."""


class ParameterGroup(abc.ABC):
    """Parameters that are gathered together, and whose gradients are summed over the devices together.

    Attributes:
        name: of the module that they belong to, for messages.
        of_caller: they are gathered around the call of the whole model, by its own hooks.
        devices: how many store a piece.
        replicas: how many devices have the same piece.
        in_backward: `before_backward` gathers them.
        stays: what is gathered in the forward is there until the backward has run.
        ahead: the engine gathers the next group while what reads this one still runs.
    """

    name: str
    of_caller: bool
    devices: int
    replicas: int = 1
    in_backward: bool
    stays: bool
    ahead: bool

    @abc.abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """The parameters in full size, of any dtype; their memory need not be there."""

    @abc.abstractmethod
    def open(self) -> None:
        """The model is given the full-size parameters, and hooks that do nothing but what a graph can do.

        Raises:
            NotSupported: a parameter is not what a graph can read.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """The model is as it was before `open`."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """A forward has failed, and the model goes on without us or not at all: parameters are given back."""

    @abc.abstractmethod
    def begin(self, backward: bool) -> None:
        """Begin to gather them while something else runs. `take`, or `before_backward`, waits for it.

        Args:
            backward: it is in the backward.
        """

    @abc.abstractmethod
    def take(self) -> None:
        """In the forward: gather them, before somebody reads them."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """In the forward: nobody reads them any more."""

    @abc.abstractmethod
    def before_backward(self, read: bool) -> None:
        """In the backward: gather them, before somebody reads them. It may be called several times.

        Args:
            read: somebody does; False: only their gradients will come, and the engine may do without.
        """

    @abc.abstractmethod
    def after_backward(self) -> None:
        """In the backward: their gradients are complete."""

    @abc.abstractmethod
    def end_of_backward(self) -> None:
        """The backward has ended, also for those of whom nobody has said it."""

    @abc.abstractmethod
    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Within: they are there. Between steps, for outputs that are computed when they are read."""

    @property
    @abc.abstractmethod
    def is_there(self) -> bool:
        """The parameters have memory."""

    @abc.abstractmethod
    def version(self) -> Hashable:
        """Another one when what is stored has been changed."""

    @abc.abstractmethod
    def gathered_bytes(self) -> int:
        """Bytes of all pieces of all parameters together, as they are gathered."""

    @abc.abstractmethod
    def reduced_bytes(self, parameter: Tensor) -> int:
        """Bytes of the gradient of a parameter, of any dtype, as it is summed over the devices; 0 if that is
        not done for the group.
        """

    @abc.abstractmethod
    def piece(self, parameter: Tensor) -> Tensor:
        """What this device stores of a parameter: some of its numbers or none, of any shape and dtype."""


class ShardedParameters:
    """The groups of a model, and which of a graph's inputs are whose.

    Args:
        groups: of the model.
        around: what else of the model is to be otherwise while it has full-size parameters.
        buckets: in which gradients are summed that no group sums.
        failed: called when an error has left the forward or the backward of the model; the argument is true
            if what has come of gradients is to be thrown away. It does what the engine needs to begin anew.
        recover: called before a step, for errors of others which nobody has told of.

    NOTE [after an error]: an error in the middle of a step leaves parameters gathered, gradients that are
    complete in part, and an engine that takes the next forward for a part of this step; with FSDP2 its
    gradients would be wrong, and nobody would say so. After an error in the forward no gradient is lost: of
    batches before it they may still be needed. After one in the backward what is there is in part from it.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        buckets: Buckets | None = None,
        failed: Callable[[bool], None] = lambda gradients: None,
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups, self._around, self.buckets = tuple(groups), around, buckets
        self.failed, self._recover = failed, recover
        self._resting = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Within: the model has full-size parameters, and the hooks that gather them are not called."""
        opened = []
        self._recover()
        try:
            for group in self.groups:
                opened.append(group)
                group.open()
            with self._around():
                yield
        except BaseException:
            for group in opened:
                group.abandon()
            raise
        finally:
            for group in reversed(opened):
                group.close()

    def positions(self, inputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """By number of the group, the positions of its parameters among the inputs of a graph."""
        group_of = {id(p): k for k, group in enumerate(self.groups) for p in group.parameters()}
        found: dict[int, list[int]] = {}
        for position, value in enumerate(inputs):
            if id(value) in group_of:
                found.setdefault(group_of[id(value)], []).append(position)
        return {k: tuple(places) for k, places in sorted(found.items())}

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Within: what runs is no step of the model, and takes nothing."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before
