"""garbage: Python's garbage collector while a frame is compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects that are made between two collections, and collections of each generation until the next one's turn.
THRESHOLDS = (100_000, 50, 100)

_LOCK = threading.Lock()
_within = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Within: Python looks for garbage less often, in all threads; afterwards as often as before.

    NOTE [garbage of a compilation]: compiling makes millions of small objects, most of which stay, and a
    collection looks at all that came since the last one, in the end at all of PyTorch's and the model's. Of
    17 seconds in which SmolLM2 is compiled (one core), 1.1 were spent so. What is found later has no
    data: tensors are fake while a frame is compiled. A collector that is off stays off.
    """
    global _within, _before
    with _LOCK:
        if _within == 0:
            _before = gc.get_threshold()
            if _before[0] > 0:  # 0: nothing is collected
                gc.set_threshold(*(max(pair) for pair in zip(_before, THRESHOLDS, strict=True)))
        _within += 1
    try:
        yield
    finally:
        with _LOCK:
            _within -= 1
            if _within == 0:
                gc.set_threshold(*_before)
