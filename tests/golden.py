"""Texts that a test expects, in files beside it: `make golden` writes them anew, to be read as a diff."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(found: str, test: str, name: str) -> None:
    """Compare a text with the one in `golden/NAME.txt` beside a test, or in a folder above.

    Args:
        found: the text.
        test: `__file__` of the test.
        name: of the text.
    """
    above = next((p for p in Path(test).parents if (p / "golden").is_dir()), Path(test).parent)
    path = above / "golden" / f"{name}.txt"
    if os.environ.get("STREAMBP_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found + "\n")
    assert path.exists(), f"{path} is missing: `make golden` writes it"
    assert found + "\n" == path.read_text(), f"{path.name} is another now: `make golden`, and read the diff"
