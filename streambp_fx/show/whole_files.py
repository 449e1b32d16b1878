"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import OutputError


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be written there; for a check before long work.

    Raises:
        OutputError: its folder does not exist or may not be written to, or it is a folder itself.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: the folder {path.parent} may not be written to")
    return path


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader sees half of it.

    Raises:
        OutputError: it cannot be written.
    """
    path = check_writable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error}") from error
