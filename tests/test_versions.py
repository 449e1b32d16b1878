"""Which versions are refused, and how."""

import re

import pytest

from streambp_fx.versions import (
    MINIMUM,
    TESTED,
    UnsupportedVersionError,
    check_versions,
    differences,
    release,
    require,
)


@pytest.mark.parametrize(
    ("found", "minimum"),
    [
        ("2.9", "2.9"),
        ("2.9.0", "2.9"),
        ("2.9", "2.9.0"),
        ("2.10.1", "2.9"),
        ("2.13.0+cpu", "2.9"),
        ("3.0.0.dev20261101+cu130", "2.9"),
        ("2.9.0a0+git123", "2.9"),
        ("5.0.0rc1", "5"),
        ("3.10.13", "3.10"),
        ("v5.1", "5"),
    ],
)
def test_new_enough(found, minimum):
    require("torch", found, minimum)


@pytest.mark.parametrize(
    ("name", "found", "minimum"),
    [
        ("torch", "2.8.1", "2.9"),
        ("torch", "1.13", "2.9"),
        ("transformers", "4.57.0", "5"),
        ("python", "3.9.18", "3.10"),
    ],
)
def test_too_old(name, found, minimum):
    with pytest.raises(UnsupportedVersionError, match=rf">= {re.escape(minimum)}.*found {re.escape(found)}"):
        require(name, found, minimum)


def test_the_message_names_the_tested_version():
    with pytest.raises(
        ImportError, match=r"needs PyTorch >= 2\.11 \(tested with 2\.13\), but found 2\.10\.0"
    ):
        require("torch", "2.10.0", MINIMUM["torch"])


def test_missing_and_unreadable():
    with pytest.raises(UnsupportedVersionError, match="not installed"):
        require("transformers", None, "5")
    with pytest.raises(UnsupportedVersionError, match="unknown"):
        require("torch", "unknown", "2.9")


def test_this_environment_is_supported():
    check_versions()
    assert MINIMUM.keys() == TESTED.keys()


def test_check_names_what_is_too_old(monkeypatch):
    monkeypatch.setitem(MINIMUM, "transformers", "999")
    with pytest.raises(UnsupportedVersionError, match="transformers >= 999"):
        check_versions()


@pytest.mark.parametrize("difference", differences.DIFFERENCES, ids=lambda d: d.name)
def test_what_differs_has_not_outlived_its_versions(difference):
    """Fails where the oldest version that is supported has what only newer ones had: the old way can go."""
    assert hasattr(differences, difference.name)
    oldest = release(MINIMUM[difference.library])
    assert oldest < release(difference.since), (
        f"{difference.name}: only the way of {difference.since} is left"
    )
