"""The house: rooms in layers, no import circle, no folder that is too full to read.

Rooms are folders of the package; modules beside them are rooms of their own. What a module imports counts
wherever the import stands: within functions, and for type checkers, too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "streambp_fx"
# Subpackages that lie elsewhere in the repository.
MOVED = {"passes": ROOT / "passes", "recipes": ROOT / "examples" / "recipes"}
MOST_FILES = 15  # of a folder, its `__init__.py` not counted
# From the ground up: a module imports from its own room and from lower ones. "" is the package itself, which
# says what people import. A name stands for the room and for the rooms in it that are not named themselves.
LAYERS = [
    *("errors", "units", "versions"),
    *(
        "passes.several_devices",
        "passes.graph",
        "passes.pipeline",
        "passes.cost",
        "passes.rules",
        "passes.masks",
        "passes.step",
    ),
    *("passes.s1_capture", "passes.s2_prove", "passes.s3_cut", "passes.s4_trace", "passes.s5_lower"),
    *("passes.s6_schedule.program", "passes.s6_schedule.checking", "passes.s6_schedule"),
    *("passes", "options", "runtime.segments", "runtime", "cost", "choosing", "auto_executor"),
    *("sharding", "planning"),
    *("checking.result", "show", "show.code", "show.page", "schedule", "show.status"),
    *("probing", "checking", "dynamo", "models.plain_forms", "models.recurrences", "models"),
    *(
        "unstreamed",
        "backend",
        "forwards",
        "streamed_forward",
        "transform",
        "explain",
        "plan",
        "trace",
        "integrations",
    ),
    *("verifying", "verify", "", "measure", "report", "recipes", "commands", "cli", "__main__"),
]


def modules() -> dict[str, Path]:
    """All modules of the package by name. `passes/` is imported as a part of it."""
    found = {}
    elsewhere = [(folder, (PACKAGE, name)) for name, folder in MOVED.items()]
    for folder, above in (*elsewhere, (ROOT / PACKAGE, (PACKAGE,))):
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            if above == (PACKAGE,) and inner[0] in MOVED:
                continue  # a link, in some checkouts
            parts = (*above, *inner)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that are run, at the top and within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from statements(child)


def imported(module: str) -> set[str]:
    """The modules of the package that a module imports from."""
    path = MODULES[module]
    own = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
            continue
        above = own[: len(own) + 1 - node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        within = {f"{base}.{name.name}" for name in node.names}
        found |= {name if name in MODULES else base for name in within}
    return found & set(MODULES) - {module}


IMPORTS = {module: imported(module) for module in MODULES}


def room(module: str) -> str | None:
    """The room of a module by its name in `LAYERS`, or None."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    while name and name not in LAYERS:
        name = name.rpartition(".")[0] if "." in name else ""
        if not name:
            return None
    return name


def circles() -> list[str]:
    """Import circles, each from one of its modules around to it."""
    found, done = [], set()

    def walk(module: str, way: list[str]) -> None:
        if module in way:
            found.append(" -> ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for other in sorted(IMPORTS[module]):
                walk(other, [*way, module])
            done.add(module)

    for module in MODULES:
        walk(module, [])
    return found


def test_there_is_no_circle() -> None:
    assert not circles()


def test_every_module_has_a_layer() -> None:
    assert not [m for m in MODULES if room(m) is None], "name its room in LAYERS"


def test_no_arrow_runs_upwards() -> None:
    height = {name: k for k, name in enumerate(LAYERS)}
    wrong = []
    for module, others in IMPORTS.items():
        for other in others:
            here, there = room(module), room(other)
            if here is not None and there is not None and height[there] > height[here]:
                wrong.append(f"{module} imports {other}: {there or PACKAGE} lies above {here or PACKAGE}")
    assert not wrong


def folders() -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in MODULES.values():
        found.setdefault(path.parent, []).append(path)
    return found


def test_no_folder_is_too_full() -> None:
    full = {f: len([p for p in paths if p.name != "__init__.py"]) for f, paths in folders().items()}
    assert not {str(f.relative_to(ROOT)): n for f, n in full.items() if n > MOST_FILES}


def test_every_folder_says_what_it_is_for() -> None:
    silent = []
    for folder in folders():
        opening = folder / "__init__.py"
        if not opening.is_file() or not ast.get_docstring(ast.parse(opening.read_text())):
            silent.append(str(folder.relative_to(ROOT)))
    assert not silent, "an __init__.py with a docstring is missing"


def listed(docstring: str) -> set[str]:
    """The modules of a folder that its docstring has a line for: a name, then two spaces or nothing."""
    found = re.findall(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*)(?:  .*)?$", docstring, re.MULTILINE)
    return {name for names in found for name in names.split(", ")}


def test_a_folder_that_lists_its_modules_lists_all_of_them() -> None:
    for folder in folders():
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        there = {p.stem if p.suffix == ".py" else p.name for p in folder.iterdir() if p.suffix in ("", ".py")}
        there -= {"__init__", "__pycache__", "py", "passes", "recipes"}
        if len(listed(docstring)) > 1:
            assert listed(docstring) == there, folder


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_every_folder_is_packaged() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(settings["packages"]) == there
    moved = {}
    for name in there:
        first, *others = name.removeprefix(f"{PACKAGE}.").split(".")
        if first in MOVED:
            moved[name] = str(MOVED[first].joinpath(*others).relative_to(ROOT))
    assert settings["package-dir"] == moved
