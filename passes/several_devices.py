"""What an engine of several devices does with the parameters of a graph, as numbers and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(frozen=True)
class SharedGroup:
    """Parameters of which each device stores a piece, and which are gathered together.

    Attributes:
        name: of the module that they belong to.
        devices: how many store a piece.
        stays: what is gathered in the forward is there until the backward has run.
        ahead: the next group is gathered while what reads this one still runs.
        gathered_bytes: of all pieces together, padding among them.
        reduced_bytes: of the gradient of each parameter as it is summed over the devices, with its padding;
            none of a group whose gradients are summed in buckets.
        replicas: how many devices have the same piece; sums of gradients are summed over those as well.
    """

    name: str
    devices: int
    stays: bool
    ahead: bool
    gathered_bytes: int
    reduced_bytes: Mapping[Node, int] = field(default_factory=dict)
    replicas: int = 1


@dataclass(frozen=True)
class Buckets:
    """Gradients that are summed together in the order in which they come, whatever is gathered together.

    Attributes:
        devices: how many sum.
        limits: bytes at which the first bucket is full, and each later one.
        closes_before: a gradient with which a bucket would be over its limit goes into the next one.
            Otherwise it is the last one of the bucket.
        scattered: each device has a part of the sum; otherwise all of it.
        ahead: a bucket is summed while the backward goes on.
        arrival: the order in which gradients come, from those that are handed over together; None: that
            order.
    """

    devices: int
    limits: tuple[int, int]
    closes_before: bool = False
    scattered: bool = False
    ahead: bool = True
    arrival: Callable[[Sequence[Sequence[Node]]], list[Node]] | None = None

    def fill(self, sizes: Mapping[Node, int]) -> list[list[Node]]:
        """The gradients of each bucket.

        Args:
            sizes: bytes of each gradient, in the order in which they come.
        """
        found: list[list[Node]] = [[]]
        filled = 0
        for node, size in sizes.items():
            limit = self.limits[min(len(found) - 1, 1)]
            if self.closes_before and found[-1] and filled + size > limit:
                found.append([])
                filled = 0
            found[-1].append(node)
            filled += size
            if not self.closes_before and filled >= limit:
                found.append([])
                filled = 0
        return [bucket for bucket in found if bucket]


@dataclass(frozen=True)
class SeveralDevices:
    """How several devices share the parameters of a graph; empty where there is one.

    Attributes:
        groups: what is known of each of `Facts.parameter_groups`, then of each of `of_caller`.
        of_caller: groups that are gathered around the call of the whole model, by hooks of the engine.
        buckets: how gradients are summed that are in no group; None: they are not.
    """

    groups: tuple[SharedGroup, ...] = ()
    of_caller: tuple[tuple[Node, ...], ...] = ()
    buckets: Buckets | None = None
