"""Objects that are found again while they live."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A set that keeps nothing alive. Any thread may add to it and go through it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the same thread may add while it collects garbage
        self._members: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, member: T) -> None:
        """Add a member, which leaves the set when nobody else holds it."""
        with self._lock:
            self._members.add(member)

    def __iter__(self) -> Iterator[T]:
        """Those that there are now."""
        with self._lock:
            return iter(list(self._members))
