"""Would a release work? Archives are built, checked, installed in a fresh environment, and used there.

python .ci/release_check.py [--torch "torch==2.13.0"] [--with PATH_TO_PYTHON_WITH_TORCH]

Nothing of the checkout is imported, and nothing is uploaded. The environments lie in a temporary folder,
which is removed. With --with the fresh environment sees the packages of another one (PyTorch and
transformers, which take minutes to install), and only the wheel is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Links, whose files are there in their own place; and what git alone reads.
LEFT_OUT = (".gitignore", "streambp_fx/passes", "streambp_fx/recipes")
SMOKE = """
import torch, streambp_fx
from transformers import LlamaConfig, LlamaForCausalLM
print("imported from", streambp_fx.__file__)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
ids = torch.randint(0, 97, (1, 80))
model = LlamaForCausalLM(config).train()
print(streambp_fx.verify(model, {"input_ids": ids, "labels": ids}).ok)
streambp_fx.transform(model, chunk=16)
model(input_ids=ids, labels=ids).loss.backward()
print(streambp_fx.status(model))
assert streambp_fx.status(model).streamed
"""
USER = """
import streambp_fx
from torch import nn


def streamed(model: nn.Module) -> streambp_fx.Status:
    return streambp_fx.status(streambp_fx.transform(model, chunk=2000))
"""


def step(what: str) -> None:
    """Say what is done next."""
    print(f"release-check: {what} ({time.strftime('%H:%M:%S')})", flush=True)


def run(*command: object, cwd: Path) -> str:
    """Run a command without the checkout on the path; its output.

    Raises:
        SystemExit: it failed.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release-check: {' '.join(map(str, command))} failed\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment with packages; its Python."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    if packages:
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages, cwd=folder)
    return python


def copied(target: Path) -> Path:
    """The files of the checkout that git knows or would take, elsewhere: builds leave files behind."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def check_contents(wheel: Path, source: Path) -> None:
    """The wheel has the package and nothing else, the source archive everything.

    Raises:
        SystemExit: a file is missing, or should not be there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    stray = [n for n in names if not n.startswith("streambp_fx")]
    kinds = ("py", "typed", "json", "html", "css", "js")
    stray += [n for n in names if n.startswith("streambp_fx/") and n.rpartition(".")[2] not in kinds]
    if stray or "streambp_fx/py.typed" not in names:
        sys.exit(f"release-check: the wheel has files that it should not have, or no py.typed: {stray}")
    with tarfile.open(source) as archive:
        inside = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    missing = [n for n in listed if n not in inside and not n.startswith(LEFT_OUT)]
    if missing:
        sys.exit(f"release-check: the source archive lacks {', '.join(missing)}")
    print(f"  {wheel.name}: {len(names)} files; {source.name}: {len(inside)}")


def main() -> None:
    """Build, check, install and use."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked to install for PyTorch")
    parser.add_argument("--with", dest="other", type=Path, help="a Python whose packages are to be used")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streambp-release-") as made:
        folder = Path(made)
        step("tools")
        tools = environment(folder / "tools", "build", "twine", "mypy")
        step("build the archives")
        run(tools, "-m", "build", "--outdir", folder / "dist", copied(folder / "source"), cwd=folder)
        (wheel,), (source,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        step("twine check")
        print("  " + run(tools, "-m", "twine", "check", "--strict", wheel, source, cwd=folder).strip())
        step("what is in them")
        check_contents(wheel, source)
        step("install the wheel in a fresh environment")
        python = environment(folder / "fresh")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
        if args.other is None:
            run(*pip, args.torch, cwd=folder)
            run(*pip, wheel, cwd=folder)
        else:
            where = "import sysconfig; print(sysconfig.get_path('purelib'))"
            site = run(python, "-c", where, cwd=folder).strip()
            theirs = run(args.other, "-c", where, cwd=folder).strip()
            Path(site, "of_another.pth").write_text(theirs + "\n")
            run(*pip, "--no-deps", "--ignore-installed", wheel, cwd=folder)
        step("use it")
        command = python.parent / "streambp-fx"
        print("  " + run(command, "--version", cwd=folder).strip())
        shown = run(python, "-c", SMOKE, cwd=folder)
        print("  " + shown.strip().replace("\n", "\n  "))
        if str(folder) not in shown.splitlines()[0] or "True" not in shown.splitlines()[1]:
            sys.exit("release-check: another copy of the package was used, or it is wrong")
        run(command, "plan", "Qwen3-4B", "--memory", "24GiB", cwd=folder)
        step("types, as a user's mypy sees them")
        (folder / "script.py").write_text(USER)
        run(tools, "-m", "mypy", "--strict", "--python-executable", python, "script.py", cwd=folder)
        step("all well")


if __name__ == "__main__":
    main()
