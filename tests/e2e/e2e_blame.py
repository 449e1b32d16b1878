"""Which pass is to blame for a streamed step that is wrong, as far as running it in other ways can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streambp_fx import StreamBPWarning
from streambp_fx.passes import PASSES, PROGRAM_PASSES
from streambp_fx.passes.pipeline.runner import without

WRONG = (AssertionError, StreamBPWarning)  # the warning is that of the self-check, an error in tests
OPTIONAL = [p.name for p in (*PASSES, *PROGRAM_PASSES) if p.optional]
# More rows than any sequence of the tests has.
ONE_CHUNK = {"chunk": 10**6, "loss_chunk": 10**6}


def blame(check: Callable[..., Any]) -> str:
    """A sentence that says where to look.

    Args:
        check: runs the case again, with options that replace its own; it raises where the step is wrong.
    """
    found = [name for name in OPTIONAL if _right_without(name, check)]
    if found:
        return f"It is right without the pass {' or '.join(map(repr, found))}."
    if _right(check, **ONE_CHUNK):
        return (
            "It is right in one chunk: what was proved of rows (axes, footprints), or how chunks are traced."
        )
    return (
        f"It is wrong in one chunk as well: {', '.join(p.name for p in PASSES[:3])}, or a pass over programs."
    )


def _right(check: Callable[..., Any], **options: Any) -> bool:
    try:
        check(**options)
    except WRONG:
        return False
    return True


def _right_without(name: str, check: Callable[..., Any]) -> bool:
    with without(name):
        return _right(check)
