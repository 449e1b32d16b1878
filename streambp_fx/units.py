"""Options, bytes and floating-point operations as people write them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence

# Of options that are one of a few words, those. Nothing here imports PyTorch: the command line reads them.
CHOICES = {
    "logits": ("drop", "lazy", "keep"),
    "save": ("inputs", "attention"),
    "offload": ("none", "host", "disk"),
    "order": ("auto", "layers", "chunks"),
    "policy": ("given", "auto"),
    "accumulate": ("float32", "weights"),
    "body": ("eager", "inductor"),
    "exchange": ("auto", "gather", "blocks"),
    "check": ("first", "never", "always"),
    "on_error": ("raise", "eager"),
}
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes from "80GiB", "24 GB", "500MiB" or a plain number of bytes.

    Raises:
        ValueError: no number above zero, or no unit of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = (match.group(2) or "B").upper() if match else ""
    if isinstance(text, bool) or match is None or unit not in UNITS or float(match.group(1)) <= 0:
        raise ValueError(f"{text!r} is no amount of memory: give a number with a unit, such as 80GiB or 24GB")
    return int(float(match.group(1)) * UNITS[unit])


def readable(count: float) -> str:
    """Bytes for people: "512 B", "12.0 KiB", "33.55 GiB"; halves are rounded up, as in the page's script."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{math.floor(count * 10 + 0.5) / 10:.1f} {unit}"
        count /= 1024
    return f"{math.floor(count * 100 + 0.5) / 100:,.2f} GiB"


def readable_work(flops: float) -> str:
    """Floating-point operations for people: "12.3 GFLOP"."""
    count = flops / 1e6
    for unit in ("MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TFLOP"


def did_you_mean(name: str, valid: Sequence[str]) -> str:
    """ " Did you mean 'x'?", with the name that is nearest to one that there is not; "" if none is near."""
    lower = {v.lower(): v for v in valid}
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff=0.5)
    return f" Did you mean {lower[near[0]]!r}?" if near else ""
