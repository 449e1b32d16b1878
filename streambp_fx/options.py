"""Options of the compiler, under the same names everywhere: keyword, key of `options`, command line flag."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

# Rows of a loss chunk: logits of 256 rows stay small, and the head's weight gradient (vocabulary x hidden
# size) is not rewritten too often.
LOSS_CHUNK = 256
AUTO_CHUNK = 2048


@dataclass(frozen=True)
class Options:
    """How a model is streamed.

    Attributes:
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        loss_chunk: rows in a chunk of the loss head.
        logits: "drop" (None in the output when labels are given in training) or "keep".
    """

    chunk: int | str = "auto"
    loss_chunk: int = LOSS_CHUNK
    logits: str = "drop"

    def __post_init__(self) -> None:
        if self.chunk != "auto":
            _positive("chunk", self.chunk, ' or "auto"')
        _positive("loss_chunk", self.loss_chunk)
        if self.logits not in ("drop", "keep"):
            raise ValueError(f'logits must be "drop" or "keep", not {self.logits!r}')

    @property
    def rows(self) -> int:
        """Rows of a chunk as a number."""
        return AUTO_CHUNK if self.chunk == "auto" else int(self.chunk)

    @staticmethod
    def parse(given: dict[str, Any]) -> Options:
        """Options from keywords; an unknown name is an error that names the nearest valid one.

        Raises:
            ValueError: an unknown option, or a value that is not allowed.
        """
        valid = [f.name for f in fields(Options)]
        for name in given:
            if name not in valid:
                near = difflib.get_close_matches(name, valid, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown option {name!r}; valid options: {', '.join(valid)}.{hint}")
        return Options(**given)


def _positive(name: str, value: object, extra: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int{extra}, not {value!r}")
