"""Refuses to run on versions of Python, PyTorch and transformers that cannot work.

Only release numbers count: a local build ("2.13.0+cpu"), a nightly ("2.14.0.dev20261101") or a
release candidate ("2.9.0rc1") is taken for the release that it names.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re

#: Oldest versions that are accepted, and from which to which `make compat` was run (docs/versions.md).
MINIMUM = {"python": "3.10", "torch": "2.11", "transformers": "5"}
TESTED = {"python": "3.10 to 3.13", "torch": "2.11 to 2.15", "transformers": "5.0 to 5.24"}

_TITLES = {"python": "Python", "torch": "PyTorch", "transformers": "transformers"}


class UnsupportedVersionError(ImportError):
    """A package (or Python itself) is missing or older than streambp-fx supports."""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version string: "2.13.0+cpu" -> (2, 13, 0).

    Raises:
        UnsupportedVersionError: it begins with no number.
    """
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise UnsupportedVersionError(f"cannot read a version number from {version!r}")
    return tuple(int(part) for part in match.group(1).split("."))


def require(name: str, found: str | None, minimum: str) -> None:
    """Check one version.

    Args:
        name: what it is the version of, one of the keys of `MINIMUM` or any other name.
        found: the version found, or None if it is not installed.
        minimum: the oldest version that will do.

    Raises:
        UnsupportedVersionError: `found` is None, unreadable, or older than `minimum`.
    """
    title = _TITLES.get(name, name)
    if found is None:
        raise UnsupportedVersionError(f"streambp-fx needs {title} >= {minimum}, but it is not installed")
    have, need = release(found), release(minimum)
    width = max(len(have), len(need))
    if have + (0,) * (width - len(have)) >= need + (0,) * (width - len(need)):
        return
    tested = f" (tested with {TESTED[name]})" if name in TESTED else ""
    raise UnsupportedVersionError(f"streambp-fx needs {title} >= {minimum}{tested}, but found {found}")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions() -> None:
    """Check Python, PyTorch and transformers of this process against `MINIMUM`; imports neither.

    Raises:
        UnsupportedVersionError: names what is too old or missing, what was found and what is needed.
    """
    require("python", platform.python_version(), MINIMUM["python"])
    require("torch", _installed("torch"), MINIMUM["torch"])
    require("transformers", _installed("transformers"), MINIMUM["transformers"])
