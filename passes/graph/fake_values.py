"""Fake tensors like those of a captured graph, with sizes of an environment of their own.

What running something takes for granted about these sizes does not become true of the captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from .facts import expression
from .symbols import SymbolTable, evaluate, new_fake_mode


class Environment:
    """A fake mode with a symbol for each of a captured graph.

    Args:
        values: of the symbols of the captured graph, in the call for which it was captured (`Facts.values`).
            Others get a value when they are met.

    Attributes:
        mode: the fake mode.
        sizes: the symbolic integer for each symbol of the captured graph.
        symbols: the symbol of the captured graph for each of its own.
    """

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self.mode = new_fake_mode()
        self.sizes: dict[sympy.Symbol, Any] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        assert self.mode.shape_env is not None
        self._table = SymbolTable(self.mode.shape_env)
        for symbol, hint in values.items():
            self._add(symbol, hint)

    def _add(self, symbol: sympy.Symbol, hint: int) -> None:
        self.sizes[symbol] = self._table.new(str(symbol), max(2, hint))  # symbols are at least 2
        self.symbols[expression(self.sizes[symbol])] = symbol

    def like(self, value: Any) -> Any:
        """A fake tensor like a fake tensor of the captured graph; numbers are translated."""
        if not isinstance(value, Tensor):
            return self.size(value) if isinstance(value, torch.SymInt) else value
        shape, stride = ([self.size(s) for s in sizes] for sizes in (value.shape, value.stride()))
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    def size(self, size: int | torch.SymInt) -> Any:
        """A size of the captured graph, or a number of selected rows, in the symbols of this environment."""
        asked = expression(size)
        for symbol in sorted(asked.free_symbols - self.sizes.keys(), key=str):
            self._add(symbol, 2)
        return evaluate(asked, self.sizes)
