"""Names of values: the model's own where it has them, else those of the ops."""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable

from torch.fx import Node

from ...passes.graph.facts import Facts
from ...passes.graph.sources import IN_MODULE, path
from .helpers import HELPERS

# `query = ...`, also with an annotation, but neither `a, b = ...` nor `a == b`.
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)\s*(?::[^=]+)?=(?!=)")
FRAME = re.compile(r'File "[^"]*", line \d+, in (\S+)')
# Functions whose name says nothing about what they return.
SILENT = {"forward", "__call__", "wrapper", "<lambda>", "inner", "call", "func", "to"}
# What a printed program defines itself.
RESERVED = {
    "torch", "math", "operator", "aten", "T", "CHUNK", "LOSS_CHUNK", "DEVICE", "step", "parameters",
    "buffers", "constants", "cotangents", "seed", "gradients", "whole_values", "epilogue", "loss_of",
    "rows", "prefix", "low", "total", "start", "columns", "index", "program", "found", "unit",
    "itertools", *HELPERS,
}  # fmt: skip


class Scope:
    """Names in use in one function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*RESERVED, *keyword.kwlist, *dir(builtins), *taken}

    def new(self, base: str) -> str:
        """`base`, or `base_1`, `base_2`, ... if it is in use; in use from now on."""
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


class ModelNames:
    """How the model calls the values of a captured graph."""

    def __init__(self, facts: Facts) -> None:
        self.by_name = {n.name: n for n in facts.nodes}
        self.placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        self.facts = facts
        self._bases: dict[Node, str] = {}
        self.paths = _paths(self.placeholders)

    def of(self, node: Node) -> str:
        """A name for a value, not unique."""
        if node not in self._bases:
            self._bases[node] = _identifier(self._find(node))
        return self._bases[node]

    def kind(self, placeholder: Node) -> str:
        """ "parameter", "buffer" or "input"."""
        if placeholder in self.facts.parameters:
            return "parameter"
        return "buffer" if "._buffers[" in placeholder.meta.get("source", "") else "input"

    def _find(self, node: Node) -> str:
        if node.op == "placeholder":
            return "_".join([p for p in self.paths[node].split(".") if not p.isdigit()][-2:])
        if node.op == "get_attr":
            return str(node.target)
        return from_source(node) or op_name(node)


def _paths(placeholders: list[Node]) -> dict[Node, str]:
    """Dotted names; where two models have a parameter of one name, the name of the model comes first."""
    found = {n: path(n) for n in placeholders}
    count = Counter(found.values())
    scope = Scope()
    for node, name in found.items():
        before, *inside = IN_MODULE.split(node.meta.get("source", ""), maxsplit=1)
        if inside and count[name] > 1:
            root = re.findall(r"[A-Za-z_]\w*", before)[-1:]
            found[node] = scope.new(".".join([*root, name]))
    return found


def from_source(node: Node) -> str | None:
    """The variable that the model's line assigns a value to, or the module or function that returns it."""
    frames = (node.meta.get("stack_trace") or "").rstrip()
    if not frames:
        return None
    code = _code(frames)
    assigned = ASSIGNMENT.match(code)
    if any(_same_statement(frames, u) for u in node.users):
        return _module(node, own=True)
    if assigned is not None and assigned.group(1) != "_":
        return assigned.group(1)
    function = FRAME.findall(frames)[-1:]
    if code.startswith("return ") and function and function[0] not in SILENT:
        return function[0]
    return _module(node, own=not code.startswith("return "))


def _code(frames: str) -> str:
    """The line of code of the innermost frame."""
    lines = [line.strip() for line in frames.splitlines() if line.strip()]
    places = [k for k, line in enumerate(lines) if line.startswith("File ")]
    return lines[places[-1] + 1] if places and places[-1] + 1 < len(lines) else ""


def _same_statement(frames: str, user: Node) -> bool:
    other = (user.meta.get("stack_trace") or "").rstrip()
    return _statement(other) == _statement(frames)


def _statement(frames: str) -> list[str]:
    """Frames without the marks that PyTorch puts under the part of a line."""
    return [line for line in frames.splitlines() if line.strip().strip("^~")]


def _module(node: Node, own: bool) -> str | None:
    """Last name of the innermost module; with `own`, only where it is one of PyTorch's."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return None
    name, kind = stack[-1][0], stack[-1][1]
    if own and not str(getattr(kind, "__module__", kind)).startswith("torch.nn"):
        return None
    last = re.findall(r"[A-Za-z_]\w*", str(name))[-1:]
    return last[0] if last and last[0] not in ("self", "__self__") else None


def op_name(node: Node) -> str:
    """The op without its overload: `mul`."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.name.split("::")[-1].strip("_")
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"value_{name}" if name[0].isdigit() else name
