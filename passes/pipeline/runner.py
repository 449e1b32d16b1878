"""Runs passes, one after the other: each is timed and reported, and a failure names it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..graph.facts import PassError
from .log import report

Subject = TypeVar("Subject")
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Pass(Generic[Subject, Settings]):
    """One pass.

    Attributes:
        name: what it is called in the log, in a trace and in errors.
        purpose: what it does, in one line.
        run: takes what the pass before has made, and the settings of the run; gives what the next one takes.
        needs, gives: what must be known before it, and what is known after it, in words.
        applies: whether these settings ask for it.
        optional: it may be switched off: what comes out is then slower or larger, and the same.
        autocast: it runs under the autocast of the step. Later passes do not: by then casts are ops.
    """

    name: str
    purpose: str
    run: Callable[[Subject, Settings], Subject]
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    applies: Callable[[Settings], bool] = lambda settings: True
    optional: bool = False
    autocast: bool = False

    def __post_init__(self) -> None:
        _OPTIONAL[self.name] = self.optional


_OPTIONAL: dict[str, bool] = {}  # of each pass that there is
Verifier = Callable[[Pass[Any, Any], Any], None]
_switched_off: ContextVar[frozenset[str]] = ContextVar(
    "streambp_without", default=frozenset(filter(None, os.environ.get("STREAMBP_WITHOUT", "").split(",")))
)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within: passes of these names are not run, if they are optional. For finding a fault by halves.

    The environment variable STREAMBP_WITHOUT=reorder,rematerialize does the same for a whole process.

    Raises:
        ValueError: there is no such pass, or it is not optional.
    """
    check_optional(names)
    token = _switched_off.set(_switched_off.get() | set(names))
    try:
        yield
    finally:
        _switched_off.reset(token)


def check_optional(names: Iterable[str] | None = None) -> None:
    """Passes of these names exist and may be switched off.

    Args:
        names: None for those that are switched off.

    Raises:
        ValueError: not so.
    """
    for name in _switched_off.get() if names is None else names:
        if not _OPTIONAL.get(name, False):
            optional = ", ".join(sorted(n for n, may in _OPTIONAL.items() if may))
            why = "has to run" if name in _OPTIONAL else "does not exist"
            raise ValueError(f"cannot switch off the pass {name!r}: it {why}. Passes that may be: {optional}")


def run_passes(
    passes: Iterable[Pass[Subject, Settings]],
    subject: Subject,
    settings: Settings,
    verify: Verifier | None = None,
    checked: bool | None = None,
) -> Subject:
    """Run passes in order.

    Args:
        passes: in order.
        subject: what the first one takes.
        settings: of the run, given to each.
        verify: called with a pass and what it made; raises if something in it is not so.
        checked: whether it is; None: if the environment says so (STREAMBP_CHECK=1).

    Raises:
        PassError: a pass failed, or what it made is not sound.
    """
    checked = bool(os.environ.get("STREAMBP_CHECK")) if checked is None else checked
    for one in passes:
        if not one.applies(settings) or (one.optional and one.name in _switched_off.get()):
            continue
        start = time.perf_counter()
        with nullcontext() if one.autocast else torch._C._DisableAutocast():
            subject = _guarded(one.name, one.run, subject, settings)
        seconds = time.perf_counter() - start
        if verify is not None and checked:
            _guarded(one.name, verify, one, subject)
        report(one.name, subject, seconds)
    return subject


def _guarded(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except PassError:
        raise
    except Exception as error:
        raise PassError(name, error) from error


def check_order(passes: Collection[Pass[Any, Any]]) -> None:
    """Every pass comes after those that give what it needs, and names are different.

    Raises:
        ValueError: not so.
    """
    known: set[str] = set()
    names = [p.name for p in passes]
    if len(set(names)) < len(names):
        raise ValueError(f"two passes have one name: {names}")
    for one in passes:
        missing = set(one.needs) - known
        if missing:
            raise ValueError(
                f"pass {one.name!r} needs {', '.join(sorted(missing))}, which no pass before it gives"
            )
        known |= set(one.gives)
