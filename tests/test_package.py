"""The package as it is shipped: wheel and sdist are built, and the wheel is used outside the checkout."""

import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import streambp_fx

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("streambp_fx", "streambp_fx.passes", "streambp_fx.passes.rules", "streambp_fx.cli")

# Folders that an archive lists, and that have a dot in their name.
FOLDERS = {".ci", ".github"}

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
    caches = {".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__"}
    hidden = {".venv", "build", "dist", *caches}
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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what belongs to a checkout is asked of git")
def test_a_release_has_all_files_and_no_others(built, wheel, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    release_check = importlib.import_module("release_check")
    (source,) = built.glob("*.tar.gz")
    release_check.check_contents(wheel, source)


@pytest.mark.slow
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
    assert "streambp_fx/py.typed" in names
    kinds = {n.rpartition(".")[2] for n in names if n.startswith("streambp_fx/")}
    assert kinds == {"py", "typed", "json", "html", "css", "js"}
    shipped = {n for n in names if n.endswith(".py")}
    ours = {f"streambp_fx/{f.relative_to(ROOT)}" for f in (ROOT / "passes").rglob("*.py")}
    ours |= {f"streambp_fx/recipes/{f.name}" for f in (ROOT / "examples" / "recipes").glob("*.py")}
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
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links), links
    assert "Description-Content-Type: text/markdown" in metadata
    for label in ("Homepage", "Documentation", "Source", "Issues", "Changelog"):
        assert f"Project-URL: {label}, https://" in metadata
    assert f"Version: {streambp_fx.__version__}\n" in metadata
    for extra in ("demo", "plot", "trl", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "Apache License" in licence and "Version 2.0" in licence


def test_the_sdist_is_complete(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    made = {"PKG-INFO", "setup.cfg"}
    found = {n for n in names - made if "." in n.rsplit("/", 1)[-1] or "Makefile" in n or n == ".ci/run"}
    found = {n for n in found if not n.startswith("streambp_fx.egg-info") and n != ".ci"}
    wanted = {str(f.relative_to(ROOT)) for f in _source_files()}
    left_out = {".gitignore"} | {
        n for n in wanted if n.startswith(("streambp_fx/passes/", "streambp_fx/recipes/"))
    }
    assert wanted - left_out - names == set(), "missing"
    assert found - wanted - FOLDERS == set(), "stray"


def test_the_version_is_said_once() -> None:
    """In the package; the citation repeats it, since it is read without the package."""
    settings = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "streambp_fx.__version__" }' in settings
    assert f"version: {streambp_fx.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_command_line_answers_without_pytorch() -> None:
    """`--version` and `--help` within a second; the seconds of a machine at work say nothing."""
    code = (
        "import sys; from streambp_fx.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as left: assert left.code == 0\n"
        "heavy = {'torch', 'transformers', 'sympy', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for asked in (["--version"], ["--help"], ["plan", "--help"], ["doctor", "--help"]):
        shown = _run(sys.executable, "-c", code, *asked, cwd=ROOT)
        assert "streambp-fx" in shown


@pytest.mark.slow
def test_names_are_not_hidden_by_modules_of_their_name() -> None:
    code = (
        "import streambp_fx, streambp_fx.schedule, streambp_fx.transform, streambp_fx.verify\n"
        "for name in streambp_fx.__all__: assert callable(getattr(streambp_fx, name)), name\n"
        "assert set(streambp_fx.__all__) <= set(dir(streambp_fx))"
    )
    _run(sys.executable, "-W", "error::ImportWarning", "-c", code, cwd=ROOT)
