"""What docstrings of public code must say, and the share of it that does: `python tests/docstrings.py`.

Public is what has no underscore before its name, its class or its module. The rules are in CONTRIBUTING.md;
`problems` has them one by one. The source is read, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Function = ast.FunctionDef | ast.AsyncFunctionDef
KINDS = {
    "docstring": "public names have a docstring",
    "tensors": "that take or return tensors say shape or dtype",
    "units": "that return a number say of what",
    "errors": "that raise have a section Raises",
    "arguments": "that users call describe their arguments",
}
#: A shape such as (B, T, hidden) or (rows,), or a word for what a tensor is.
TENSOR_WORDS = re.compile(
    r"\((\w+( or fewer)?, ?)*([A-Z]|[bB]atch|rows|samples|tokens|heads|hidden|\d)( or fewer)?,[^()]*\)"
    r"|\b(shapes?|dtypes?|scalars?|dims?|bool|b?float\d+|int\d+)\b"
)
UNIT_WORDS = re.compile(
    r"\b(bytes|[KMGkmg]iB|rows?|columns|tokens|seconds|elements|entries|operations|samples|sequences"
    r"|positions?|layers|chunks|sweeps|dims?|index|numbers?|count|how (many|often|far)|share|fraction|factor"
    r"|relative|norm|size|length|exit status)\b",
    re.IGNORECASE,
)
#: Methods that torch or transformers call on subclasses of their classes.
HOOKS = re.compile(
    r"forward|backward|setup_context|run_node|run|call_\w+|fetch_args_kwargs_from_env|placeholder|get_attr|output"
    r"|on_\w+|trace|create_\w+"
)


#: Decorators that register rules: a table of ops shows the first line of each.
REGISTERED = re.compile(r"(\w+\.)*(rule|local_rule|mask_rule|transfer|rewrite|emit|flops|register\w*)\b")


@dataclass
class Place:
    """A public function, method or class.

    Attributes:
        node: its definition.
        path: of its file, relative to the repository.
        owner: the class that it is a method of.
        exported: users reach it by a name of `streambp_fx.__all__`.
        plain: its first line is enough.
    """

    node: Function | ast.ClassDef
    path: str
    owner: ast.ClassDef | None = None
    exported: bool = False
    plain: bool = False

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    def __str__(self) -> str:
        owner = f"{self.owner.name}." if self.owner else ""
        return f"{self.path}:{self.node.lineno}: {owner}{self.node.name}"


@dataclass
class Code:
    """All modules that are read: path to tree, and what is known of their classes.

    Attributes:
        exported: names in `streambp_fx.__all__`.
        classes: name of a class to its definitions.
    """

    trees: dict[str, ast.Module]
    exported: set[str] = field(default_factory=set)
    classes: dict[str, list[ast.ClassDef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append(node)
        first = self.trees.get("streambp_fx/__init__.py")
        for node in first.body if first else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.exported = set(ast.literal_eval(node.value))

    @classmethod
    def of_repository(cls) -> Code:
        """The package and the passes."""
        paths = [*(ROOT / "streambp_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
        names = sorted({str(p.relative_to(ROOT)) for p in paths if p.is_relative_to(ROOT)})
        # Some Pythons follow the link to `passes/`.
        own = [n for n in names if not n.startswith("streambp_fx/passes/")]
        return cls({n: ast.parse((ROOT / n).read_text()) for n in own if _is_public(n)})

    def places(self) -> Iterator[Place]:
        """All that is public."""
        for path, tree in self.trees.items():
            yield from self._within(tree.body, path, None)

    def _within(self, body: list[ast.stmt], path: str, owner: ast.ClassDef | None) -> Iterator[Place]:
        for node in body:
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from self._within([*node.body, *getattr(node, "orelse", [])], path, owner)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield Place(node, path, owner, node.name in self.exported and owner is None)
                yield from self._within(node.body, path, node)
            elif isinstance(node, Function) and not node.name.startswith("_") and not _is_setter(node):
                exported = (owner or node).name in self.exported
                yield Place(node, path, owner, exported, self._is_plain(node, owner))

    def _is_plain(self, node: Function, owner: ast.ClassDef | None) -> bool:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if any(d.split("(")[0].split(".")[-1] in ("property", "cached_property") for d in decorators):
            return True
        if any(REGISTERED.match(d) for d in decorators):
            return True
        if owner is None:
            return False
        accessor = not _parameters(node) and len(node.body) <= 2 and isinstance(node.body[-1], ast.Return)
        return accessor or self._overrides(node.name, owner)

    def _overrides(self, name: str, owner: ast.ClassDef) -> bool:
        """True if a base has the method too: a class of ours, or of torch or transformers, which calls it."""
        for base in owner.bases:
            module, _, known_as = ast.unparse(base).split("[")[0].rpartition(".")
            known = [] if module else self.classes.get(known_as, [])
            if not known and HOOKS.fullmatch(name):
                return True
            for parent in known:
                own = any(n.name == name for n in _methods(parent))
                if parent is not owner and (own or self._overrides(name, parent)):
                    return True
        return False


def problems(place: Place) -> dict[str, str | None]:
    """What the rules that apply to a place say of it: kind of a rule to what is wrong, None if nothing is."""
    doc = place.doc
    found: dict[str, str | None] = {"docstring": None if doc else "has no docstring"}
    if isinstance(place.node, ast.ClassDef):
        making = [n for n in _methods(place.node) if n.name in ("__init__", "__post_init__")]
        found |= _unannounced(doc, {name for function in making for name in _raised(function)})
        if place.exported and not _is_error(place.node):
            found |= _undescribed(doc, _fields(place.node), "Args", "Attributes")
        return found
    if _returns_number(place.node):
        found["units"] = None if UNIT_WORDS.search(doc) else "does not say what its number counts"
    if place.plain:
        return found
    if _has_tensors(place.node):
        found["tensors"] = None if TENSOR_WORDS.search(doc) else "says neither shape nor dtype of its tensors"
    found |= _unannounced(doc, _raised(place.node))
    if place.exported:
        found |= _undescribed(doc, _parameters(place.node), "Args")
    return found


def _unannounced(doc: str, raised: set[str]) -> dict[str, str | None]:
    if not raised:
        return {}
    section = _section(doc, "Raises")
    missing = sorted(name for name in raised if not re.search(rf"\b{name}\b", section))
    return {"errors": f"raises {', '.join(missing)} without a word under Raises" if missing else None}


def _undescribed(doc: str, names: list[str], *sections: str) -> dict[str, str | None]:
    if len(names) < 2:
        return {}
    text = "".join(_section(doc, s) for s in sections)
    missing = [n for n in names if not re.search(rf"\b{n}\b", text)]
    title = " or ".join(sections)
    return {"arguments": f"does not describe {', '.join(missing)} under {title}" if missing else None}


def _section(doc: str, title: str) -> str:
    """The lines below a title that are further in than it."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n?|\n)*)", doc, re.MULTILINE)
    return found.group(1) if found else ""


def _is_public(path: str) -> bool:
    return not any(p.startswith("_") and p != "__init__.py" for p in Path(path).parts)


def _is_setter(node: Function) -> bool:
    """True for parts of a property that are not its getter, and for overloads."""
    decorators = (ast.unparse(d) for d in node.decorator_list)
    return any(re.search(r"\.(setter|deleter)$|\boverload$", d) for d in decorators)


def _is_error(node: ast.ClassDef) -> bool:
    return node.name.endswith(("Error", "Warning"))


def _arguments(node: Function) -> list[ast.arg]:
    given = node.args
    others = [a for a in (given.vararg, given.kwarg) if a is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *others]


def _parameters(node: Function) -> list[str]:
    """Names of the public parameters, without the instance or the class."""
    names = [a.arg for a in _arguments(node)]
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


def _fields(node: ast.ClassDef) -> list[str]:
    """What a class is made of: the fields of a dataclass, or the parameters of `__init__`."""
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        names = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)]
        return [n for n in names if not n.startswith("_")]
    return next((_parameters(n) for n in _methods(node) if n.name == "__init__"), [])


def _methods(node: ast.ClassDef) -> list[Function]:
    return [n for n in node.body if isinstance(n, Function)]


def _has_tensors(node: Function) -> bool:
    """True if a parameter or the result is a tensor or holds tensors; functions of tensors do not count."""
    given = [node.returns, *(a.annotation for a in _arguments(node))]
    texts = [re.sub(r"Callable\[.*\]", "", ast.unparse(a)) for a in given if a is not None]
    return any(re.search(r"\bTensor\b", t) for t in texts)


def _returns_number(node: Function) -> bool:
    result = "" if node.returns is None else ast.unparse(node.returns)
    return re.fullmatch(r"(int|float)( \| (int|float|None))*", result) is not None


def _raised(node: Function) -> set[str]:
    """Types of the errors that a function raises itself; not assertions, nor what it raises on or catches."""
    return _raised_in(node.body) - {"AssertionError", "NotImplementedError"}


def _raised_in(parts: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for part in parts:
        if isinstance(part, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(part, ast.Try):
            caught = {_last_name(n) for h in part.handlers if h.type is not None for n in _types(h.type)}
            found |= _raised_in(part.body) - caught
            found |= _raised_in([*part.handlers, *part.orelse, *part.finalbody])
            continue
        if isinstance(part, ast.Raise) and part.exc is not None:
            name = _last_name(part.exc.func if isinstance(part.exc, ast.Call) else part.exc)
            found |= {name} if name[:1].isupper() else set()
        found |= _raised_in(ast.iter_child_nodes(part))
    return found


def _types(caught: ast.expr) -> list[ast.expr]:
    return caught.elts if isinstance(caught, ast.Tuple) else [caught]


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def main() -> int:
    """Prints what is missing, or how much is there; the exit status is 1 if anything is missing."""
    concerned: Counter[str] = Counter()
    fine: Counter[str] = Counter()
    for place in Code.of_repository().places():
        for kind, problem in problems(place).items():
            concerned[kind] += 1
            fine[kind] += problem is None
            if problem is not None:
                print(f"{place} {problem}")
    shares = [f"{fine[k]} of {concerned[k]} {what}" for k, what in KINDS.items()]
    print("docstrings: " + "; ".join(shares))
    return int(fine != concerned)


if __name__ == "__main__":
    sys.exit(main())
