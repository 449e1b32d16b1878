"""faults: what a checker finds wrong, before its caller says in what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Fault(Exception):
    """What is wrong.

    Attributes:
        instruction: at which that is seen; None: at the one that is followed, if one is.
    """

    def __init__(self, words: str, instruction: Any = None) -> None:
        super().__init__(words)
        self.instruction = instruction


def place_of(instruction: Any, line: Callable[[Any], str]) -> str:
    """Where something is wrong, as a part of a message; empty if it is not wrong at an instruction.

    Args:
        instruction: of any kind, or None.
        line: says what it is in one line; of one that is so broken that it cannot, the kind is said.
    """
    if instruction is None:
        return ""
    try:
        return f", at `{line(instruction)}`"
    except Exception:
        return f", at `{type(instruction).__name__}`"
