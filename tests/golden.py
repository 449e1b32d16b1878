"""Texts that a test expects, in files beside it: `make golden` writes them anew, to be read as a diff."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(found: str, test: str, name: str) -> None:
    """Compare a text with the one in `golden/NAME.txt` beside a test.

    Args:
        found: the text.
        test: `__file__` of the test.
        name: of the text.
    """
    path = Path(test).parent / "golden" / f"{name}.txt"
    if os.environ.get("STREAMBP_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found + "\n")
    assert path.exists(), f"{path} is missing: `make golden` writes it"
    assert found + "\n" == path.read_text(), f"{path.name} is another now: `make golden`, and read the diff"
