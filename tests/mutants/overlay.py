"""Imports one module of the package from another file: the module with a change (`changes`)."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

# The environment variable: "streambp_fx.passes.s2_prove.axes=/path/of/the/changed.py".
VARIABLE = "STREAMBP_MUTANT"


class _Loader(SourceFileLoader):
    """Loads the text of another file under the name, and with the path, of the module itself."""

    def __init__(self, name: str, path: str, changed: str) -> None:
        super().__init__(name, path)
        self.changed = changed

    def get_code(self, fullname: str):
        return compile(Path(self.changed).read_text(), self.path, "exec", dont_inherit=True)


class Overlay(importlib.abc.MetaPathFinder):
    """Finds one module in another file."""

    def __init__(self, setting: str) -> None:
        self.name, self.changed = setting.split("=", 1)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.origin is not None
        loader = _Loader(fullname, spec.origin, self.changed)
        parts = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=parts
        )
