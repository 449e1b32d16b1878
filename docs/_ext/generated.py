"""What is written when the site is built: tables of ops, the list of public names, what the examples print.

It comes from the registries of the compiler, the package and the scripts, so it cannot be out of date. What
scripts print is kept until one of them or the package changes, since running them takes a minute.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
SOURCES = ("passes", "streambp_fx", "examples", "docs/worked_example.py")


# ---- ops


def op_name(op: Any) -> str:
    """`aten.add.Tensor`, or a function's name."""
    return str(op) if "aten." in str(op) else getattr(op, "__name__", str(op))


def described(function: Callable) -> tuple[str, str]:
    """First line of a function's docstring, and where it is: `rules/shapes.py: view`.

    A function that another one made is described by that one.
    """
    module = importlib.import_module(function.__module__)
    name = function.__qualname__.split(".<locals>")[0]
    text = (function.__doc__ or getattr(module, name).__doc__ or "").strip()
    path = function.__module__.removeprefix("streambp_fx.").replace(".", "/")
    return text.splitlines()[0] if text else "", f"{path}.py: {name}"


def grouped(registry: Iterable[tuple[Any, Callable]]) -> dict[tuple[str, str], list[str]]:
    """Names of ops by what is said of their function and where it is."""
    result: dict[tuple[str, str], list[str]] = {}
    for op, function in registry:
        result.setdefault(described(function), []).append(op_name(op))
    return result


def table(title: str, registry: Iterable[tuple[Any, Callable]]) -> list[str]:
    """A table in Markdown: what the function says, its ops, where it is."""
    lines = [f"| {title} | ops | where |", "|---|---|---|"]
    for (text, where), ops in sorted(grouped(registry).items(), key=lambda item: item[0][1]):
        names = " ".join(f"`{name.removeprefix('aten.')}`" for name in ops)
        lines.append(f"| {text.replace('|', chr(92) + '|')} | {names} | `{where}` |")
    return [*lines, ""]


def registries() -> dict[str, tuple[str, list[tuple[Any, Callable]]]]:
    """Everything that is registered for single ops: heading, what the first column says, op and function."""
    importlib.import_module("streambp_fx.passes.s4_trace.chunk_ops")  # registers
    from streambp_fx.passes.cost.work import FLOPS
    from streambp_fx.passes.masks.elements import MASK_RULES
    from streambp_fx.passes.rules import RULES
    from streambp_fx.passes.s1_capture.normalize import REWRITES
    from streambp_fx.passes.s4_trace.evaluation import EMIT

    return {
        "Op rules": ("how the sequence moves", list(RULES.items())),
        "Forms in a chunk program": ("what a chunk does instead", list(EMIT.items())),
        "Ops of masks": (
            "the element at row i, column j",
            [(op, rule.element) for op, rule in MASK_RULES.items()],
        ),
        "Rewrites": (
            "what is written in its place",
            [(op, function) for op, functions in REWRITES.items() for function in functions],
        ),
        "Costs": ("floating-point operations", list(FLOPS.items())),
    }


INTRODUCTIONS = {
    "Op rules": "What the compiler streams. A form that a rule cannot prove is refused, with a reason.",
    "Forms in a chunk program": "All other ops are themselves in a chunk program.",
    "Ops of masks": "What a mask may be made of, so that what it hides can be proved.",
    "Rewrites": "Before anything is proved: what does nothing is taken out, and losses become a value a row.",
    "Costs": "Products that PyTorch's own count of operations does not know. Ops in neither count as none.",
}


def op_coverage() -> str:
    """All tables, in Markdown."""
    lines = []
    for heading, (title, registry) in registries().items():
        count = len({op_name(op) for op, _ in registry})
        lines += [f"## {heading}", "", f"{INTRODUCTIONS[heading]} {count} ops.", "", *table(title, registry)]
    return "\n".join(lines)


# ---- the public names


def api() -> str:
    """Directives for all public names of the package, functions first."""
    package = importlib.import_module("streambp_fx")
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors and warnings": []}
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        if not isinstance(value, type):
            kinds["Functions"].append(f".. autofunction:: streambp_fx.{name}")
        elif issubclass(value, Exception):
            kinds["Errors and warnings"].append(
                f".. autoexception:: streambp_fx.{name}\n   :show-inheritance:"
            )
        else:
            kinds["Classes"].append(
                f".. autoclass:: streambp_fx.{name}\n   :members:\n   :inherited-members:"
            )
    return "\n".join(
        f"## {kind}\n\n```{{eval-rst}}\n" + "\n\n".join(lines) + "\n```\n" for kind, lines in kinds.items()
    )


# ---- outputs of scripts


def fingerprint(script: Path) -> str:
    """Of a script and of all that it may depend on."""
    digest = hashlib.sha256(script.read_bytes())
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def output_of(script: Path) -> str:
    """What a script prints, its own folder left out of paths."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return done.stdout.replace(f"{ROOT}{os.sep}", "")


def scripts() -> list[Path]:
    """The scripts that the pages show with their output."""
    others = ROOT / "examples" / "distributed" / "planning.py", ROOT / "docs" / "worked_example.py"
    return [*sorted((ROOT / "examples").glob("*.py")), *others]


def write_outputs(folder: Path, run: bool = True) -> None:
    """`NAME.txt` for each script; with `run` off, only what is missing, and that without content."""
    folder.mkdir(parents=True, exist_ok=True)
    for position, script in enumerate(every := scripts()):
        text, stamp = folder / f"{script.stem}.txt", folder / f"{script.stem}.sha256"
        if not run:
            text.exists() or text.write_text("(the script was not run)\n")
            continue
        now = fingerprint(script)
        if not text.exists() or not stamp.exists() or stamp.read_text() != now:
            print(f"docs: running {script.name}, {position + 1} of {len(every)}", file=sys.stderr, flush=True)
            text.write_text(output_of(script))
            stamp.write_text(now)


def generate(app: Sphinx) -> None:
    """Write what the pages include."""
    folder = Path(app.srcdir) / "_generated"
    write_outputs(folder, app.config.run_scripts)
    (folder / "op_coverage.md").write_text(op_coverage())
    (folder / "api.md").write_text(api())
    from figures import benchmark_figures

    (folder / "benchmarks.md").write_text(benchmark_figures(Path(app.srcdir) / "_static"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it."""
    app.add_config_value("run_scripts", True, "env", bool)
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
