"""Long work says so on the terminal: a line that turns while a training step is captured and compiled.

On a pipe, and where that was asked for, it says so in a line every ten seconds. Both say how long it will
take, about. Nothing is shown if the environment has `STREAMBP_QUIET` set (to anything but 0).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from torch import nn

from ..passes.pipeline.log import observed

QUIET = "STREAMBP_QUIET"
PIPE_SECONDS = 10.0
#: What capturing and compiling a model takes for each of its modules: 547 of Qwen3-8B 30 s on two CPU cores.
SECONDS_OF_MODULE = 0.055
#: What comes after the graph was traced, as a share of the time until then.
AFTER_TRACING = 0.2
LEAST_SHARE = 0.05
#: What is done next, in a user's words, once the pass of this name has run.
NEXT = {"capture": "finding out what each row reads", "signatures": "making the programs of a chunk"}
_shown = threading.Lock()  # one line at a time; what is announced within is part of it
_current: Work | None = None  # what is shown


def seconds_to_compile(model: nn.Module) -> float:
    """Seconds that the capture and the compilation of a model's step take, roughly, before it has begun."""
    return SECONDS_OF_MODULE * sum(1 for _ in model.modules())


class Work:
    """Long work under way: what it is, since when, and how long it will take as far as that is known.

    Args:
        what: what is being done, as "compiling the training step".
        expected: seconds in all; None: not known yet.
    """

    def __init__(self, what: str, expected: float | None = None) -> None:
        self.what, self.expected, self.now = what, expected, ""
        self.start = self.phase = time.perf_counter()
        self.share = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.start

    def passed(self, name: str, result: Any, seconds: float) -> None:
        """A pass has run."""
        if name in NEXT:
            self.now = f" ({NEXT[name]})"

    def advanced(self, share: float) -> None:
        """That share of a graph is traced, most of the work; with a lower one another trace begins."""
        now = time.perf_counter()
        if share < self.share or not self.share:
            self.phase = now
        self.share = share
        if share >= LEAST_SHARE:  # before that it says little
            left = (now - self.phase) * (1 - share) / share
            self.expected = (self.seconds + left) * (1 + AFTER_TRACING)

    def __str__(self) -> str:
        seconds = self.seconds
        known = self.expected is not None and self.expected > seconds
        of = f" of about {self.expected:.0f} s" if known else " s so far"
        return f"streambp-fx: {self.what}, {seconds:.0f}{of}{self.now}"

    def __rich__(self) -> str:
        return str(self)


@contextlib.contextmanager
def announced(what: str, on_pipes: bool = False, expected: float | None = None) -> Iterator[None]:
    """Within: a status line with what is done. Afterwards one line with the seconds it took.

    Args:
        what: what is being done, as "compiling the training step".
        on_pipes: if standard error is no terminal, a line every `PIPE_SECONDS` instead.
        expected: seconds that it takes, roughly. Where it is part of other work that is announced, that work
            will take so long from now on.
    """
    global _current
    on_pipes = on_pipes and not _silenced() and not sys.stderr.isatty()
    if (_quiet() and not on_pipes) or not _shown.acquire(blocking=False):
        if _current is not None and expected is not None and _current.expected is None:
            _current.expected = _current.seconds + expected
        yield
        return
    work = _current = Work(what, expected)
    try:
        with observed(work.passed, work.advanced), _lines(work) if on_pipes else _status(work):
            yield
    finally:
        _current = None
        _shown.release()


@contextlib.contextmanager
def _status(work: Work) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(work):
        yield
    console.print(f"streambp-fx: {work.what} took {work.seconds:.1f} s", highlight=False)


def _lines(work: Work) -> contextlib.AbstractContextManager[None]:
    return every_ten_seconds(lambda: print(work, file=sys.stderr, flush=True))


@contextlib.contextmanager
def every_ten_seconds(write: Callable[[], object]) -> Iterator[None]:
    """Within: `write` is called now and then, in a thread of its own; never if the environment is quiet."""
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(PIPE_SECONDS):
            write()

    if _silenced():
        yield
        return
    writer = threading.Thread(target=call, name="streambp-progress", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _quiet() -> bool:
    return _silenced() or not sys.stderr.isatty()


def _silenced() -> bool:
    return os.environ.get(QUIET, "0") not in ("", "0")
