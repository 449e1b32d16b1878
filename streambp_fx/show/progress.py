"""Long work says so on the terminal: a line that turns while a training step is captured and compiled.

On a pipe, and where that was asked for, it says so in a line every ten seconds. Nothing is shown if the
environment has `STREAMBP_QUIET` set (to anything but 0).
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
PIPE_SECONDS = 10.0
_shown = threading.Lock()  # one line at a time; what is announced within is part of it


@contextlib.contextmanager
def announced(what: str, on_pipes: bool = False) -> Iterator[None]:
    """Within: a status line with the pass that ran last. Afterwards one line with the seconds it took.

    Args:
        what: what is being done, as "compiling the training step".
        on_pipes: if standard error is no terminal, a line every `PIPE_SECONDS` instead.
    """
    if not _silenced() and on_pipes and not sys.stderr.isatty():
        with _lines(what):
            yield
        return
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


@contextlib.contextmanager
def _lines(what: str) -> Iterator[None]:
    """Within: a line on standard error now and then, with the seconds so far and the pass that ran last."""
    ended, passed, start = threading.Event(), [""], time.perf_counter()

    def note(name: str, *_: object) -> None:
        passed[0] = f" ({name})"

    def write() -> None:
        while not ended.wait(PIPE_SECONDS):
            seconds = time.perf_counter() - start
            print(f"streambp-fx: {what}, {seconds:.0f} s so far{passed[0]}", file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, name="streambp-progress", daemon=True)
    writer.start()
    try:
        with observed(note):
            yield
    finally:
        ended.set()
        writer.join()


def _quiet() -> bool:
    return _silenced() or not sys.stderr.isatty()


def _silenced() -> bool:
    return os.environ.get(QUIET, "0") not in ("", "0")
