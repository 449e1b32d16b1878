"""place_rates: how fast rows go to a place with more room, and come back."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..cost.transfers import Transfers
from .measured_rates import kept_or_measured

# What is written to the disk and read back to measure it, in bytes.
SAMPLE = 128 * 2**20


class TooLittleRoom(OSError):
    """A disk has too little room to be measured."""


@dataclass(frozen=True)
class PlaceRates:
    """How fast bytes go there and come back.

    Attributes:
        out, back: bytes a second.
        at_once: both directions are used at a time.
        words: what this is assumed from.
    """

    out: float
    back: float
    at_once: bool
    words: str

    def seconds(self, moved: Transfers) -> float:
        """How long it takes to move what a step moves, whose bytes are numbers."""
        there, here = moved.out / self.out, moved.back / self.back
        return max(there, here) if self.at_once else there + here


def disk_here(again: bool = False) -> PlaceRates | None:
    """The folder of `offload="disk"` (TMPDIR), from the file of rates if it was measured before.

    Args:
        again: measure even if the file has it.

    Returns:
        None if it cannot be measured, for lack of room for instance.
    """
    folder = Path(tempfile.gettempdir())
    try:
        key = f"disk | {folder} | {folder.stat().st_dev}"
        found = PlaceRates(**kept_or_measured(key, lambda: asdict(measured_disk(folder)), again))
    except OSError:
        return None
    return replace(found, words=f"{folder}, measured: {found.words}")


def measured_disk(folder: Path) -> PlaceRates:
    """How fast a folder is written, to the disk, and read back from it.

    Raises:
        TooLittleRoom: for what is written.
        OSError: there is no such folder, or it cannot be written to.
    """
    if shutil.disk_usage(folder).free < 4 * SAMPLE:
        raise TooLittleRoom("too little to measure")
    data = os.urandom(2**20) * (SAMPLE // 2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = time.perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(2**22):
            pass
        end = time.perf_counter()
    out, back = SAMPLE / (written - begin), SAMPLE / (end - written)
    return PlaceRates(out, back, False, f"writes {out / 1e9:.2f} GB/s, reads {back / 1e9:.2f}")
