"""A virtual environment for each combination, outside of the project, and the subset run in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .combinations import Combination

ROOT = Path(__file__).parents[2]
# What the subset needs beside the project and its extras.
TOOLS = ["pytest>=8", "datasets>=4"]
EXTRAS = "demo,lora"
VERSIONS = """
import importlib.metadata as m, json, platform
there = {d.metadata["Name"] for d in m.distributions()}
found = {n: m.version(n) if n in there else "-" for n in ("torch", "transformers", "trl")}
print(json.dumps({"python": platform.python_version(), **found}))
"""
# Seconds that the subset may take.
LIMIT = 3600


class NotInstalled(Exception):
    """The environment of a combination could not be made."""


def cache() -> Path:
    """Where the environments lie: `$STREAMBP_COMPAT`, or a folder in the user's cache."""
    own = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streambp-fx" / "compat"
    return Path(os.environ.get("STREAMBP_COMPAT", own))


def interpreter(version: str) -> str | None:
    """The path of a Python, or None: one on the path, of pyenv, or one that uv has or can fetch."""
    found = shutil.which(f"python{version}")
    if found and _answers(found):
        return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = [p for p in sorted(pyenv.glob(f"{version}.*/bin/python")) if _answers(str(p))]
    if own:
        return str(own[-1])
    if shutil.which("uv"):
        subprocess.run(["uv", "python", "install", version], capture_output=True)
        asked = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        return asked.stdout.strip() if asked.returncode == 0 else None
    return None


def _answers(path: str) -> bool:
    return subprocess.run([path, "-c", ""], capture_output=True).returncode == 0


def install(combination: Combination, python: str) -> Path:
    """Make the environment, or bring the one that is there up to date. Returns its Python.

    Raises:
        NotInstalled: what the installer said.
    """
    folder = cache() / combination.name
    own = folder / "bin" / "python"
    wanted = [*combination.requirements(), f"{ROOT}[{EXTRAS}]", *TOOLS]
    if shutil.which("uv"):
        make = ["uv", "venv", "--quiet", "--python", python, str(folder)]
        add = ["uv", "pip", "install", "--quiet", "--python", str(own), "--reinstall-package", "streambp-fx"]
    else:
        make, add = [python, "-m", "venv", str(folder)], [str(own), "-m", "pip", "install", "--quiet"]
    for command in ([] if own.exists() else [make], [[*add, *wanted]]):
        for one in command:
            done = subprocess.run(one, capture_output=True, text=True)
            if done.returncode:
                raise NotInstalled(done.stderr.strip()[-600:])
    return own


def remove(combination: Combination) -> None:
    """Delete the environment of a combination."""
    shutil.rmtree(cache() / combination.name, ignore_errors=True)


def versions(python: str | Path) -> dict[str, str]:
    """What an environment has: "python", "torch", "transformers", "trl" ("-": it has none)."""
    done = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run_subset(python: str | Path) -> str:
    """Run the subset, and return what pytest writes about it as JUnit XML; "" if it ended before that."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += ["-m", "slow or not slow", "--show-capture=no", f"--junitxml={report}"]
        command += ["tests/compat/test_subset.py"]
        try:
            subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return ""
        return report.read_text() if report.is_file() else ""
