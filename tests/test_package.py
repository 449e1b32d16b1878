"""The package as it is shipped: wheel and sdist are built, and the wheel is used outside the checkout."""

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("streambp_fx", "streambp_fx.passes", "streambp_fx.passes.rules", "streambp_fx.cli")

pytestmark = pytest.mark.xdist_group("package")


def _run(*command, cwd, **kwargs):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _source_files():
    """The files of the checkout that belong to it, or all of an unpacked sdist."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]
    hidden = {".venv", "build", "dist", "__pycache__"}
    return [f for f in ROOT.rglob("*") if f.is_file() and not hidden & set(f.relative_to(ROOT).parts)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("package")
    source, out = folder / "source", folder / "dist"
    for file in _source_files():
        target = source / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    # Without --wheel or --sdist the wheel is built from the sdist, so the sdist is known to be complete.
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=folder)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    _run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"),
        *(target, wheel),
        cwd=tmp_path,
    )
    program = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    env = {**os.environ, "PYTHONPATH": str(target)}
    shown = _run(sys.executable, "-c", program, *MODULES, cwd=tmp_path, env=env).splitlines()
    assert len(shown) == len(MODULES)
    for name, file in zip(MODULES, shown, strict=True):
        assert Path(file).is_relative_to(target), f"{name} comes from {file}"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"streambp_fx", next(n for n in top if n.endswith(".dist-info"))}
    shipped = {n for n in names if n.endswith(".py")}
    ours = {f"streambp_fx/{f.relative_to(ROOT)}" for f in (ROOT / "passes").rglob("*.py")}
    ours |= {str(f.relative_to(ROOT)) for f in (ROOT / "streambp_fx").rglob("*.py")}
    assert shipped == ours, "is a new folder missing from [tool.setuptools] packages?"


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
        metadata = archive.read(f"{info}/METADATA").decode()
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert points["console_scripts"]["streambp-fx"] == "streambp_fx.cli:main"
    for line in ("Name: streambp-fx", "Requires-Python: >=3.10", "License-Expression: Apache-2.0"):
        assert line in metadata
    for extra in ("demo", "plot", "trl", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "Apache License" in licence and "Version 2.0" in licence


def test_the_sdist_is_complete(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"pyproject.toml", "README.md", "LICENSE", "passes/__init__.py", "streambp_fx/cli.py"} <= names
