"""Long work says so on the terminal: a line that turns while a training step is captured and compiled.

Nothing is shown if standard error is no terminal, or if the environment has `STREAMBP_QUIET` set (to anything
but 0).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console

from ..passes.pipeline.log import observed

QUIET = "STREAMBP_QUIET"
_shown = threading.Lock()  # one line at a time; what is announced within is part of it


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Within: a status line with the pass that ran last. Afterwards one line with the seconds it took.

    Args:
        what: what is being done, as "compiling the training step".
    """
    if _quiet() or not _shown.acquire(blocking=False):
        yield
        return
    try:
        start, console = time.perf_counter(), Console(stderr=True)
        with (
            console.status(f"streambp-fx: {what}") as status,
            observed(lambda name, *_: status.update(f"streambp-fx: {what} ({name})")),
        ):
            yield
        console.print(f"streambp-fx: {what} took {time.perf_counter() - start:.1f} s", highlight=False)
    finally:
        _shown.release()


def _quiet() -> bool:
    return os.environ.get(QUIET, "0") not in ("", "0") or not sys.stderr.isatty()
