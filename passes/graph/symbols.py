"""Size symbols: of a graph that comes in, made for them, of the sequence length; and their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from .facts import expression, tensors_of


def in_numbers(size: sympy.Expr, known: Mapping[sympy.Symbol, int], unknown: int = 1) -> int:
    """A size as a number; an estimate, where not all of it is known.

    Args:
        size: in symbols.
        known: values of some of them.
        unknown: that of the others; a larger one where the size would divide by zero, as `B % (B // 2)` does.
    """
    for value in (unknown, 2, 64, 4096):
        try:
            return int(size.subs({s: known.get(s, value) for s in size.free_symbols}))
        except ZeroDivisionError:
            continue
    return 0


class SymbolTable:
    """Symbolic integers of a fresh ShapeEnv, made for those of the graph that came in.

    Args:
        shape_env: the environment of the new symbols.
        lengths: which symbols are the sequence length: they become one symbol. None: each symbol becomes one
            of its own.
    """

    def __init__(self, shape_env: ShapeEnv, lengths: Lengths | None = None) -> None:
        self.shape_env, self.lengths = shape_env, lengths
        self._symbols: dict[sympy.Symbol, torch.SymInt] = {}
        self._length: torch.SymInt | None = None
        self._samples: dict[int, torch.SymInt] = {}  # by value

    def found(self, meaning: Collection[sympy.Symbol]) -> list[sympy.Expr]:
        """What became of symbols of the incoming graph: symbols, or what tracing found them equal to."""
        made = (self._symbols.get(s) for s in meaning)
        return [size.node.expr for size in made if isinstance(size, torch.SymInt)]

    def values(self) -> dict[sympy.Symbol, int]:
        """The value of each symbol made so far."""
        found = (size.node for size in self._symbols.values() if isinstance(size, torch.SymInt))
        return {n.expr: int(n.hint) for n in found if isinstance(n.expr, sympy.Symbol)}

    def new(self, name: str, hint: int, start: bool = False) -> torch.SymInt:
        """A fresh symbolic integer, assumed to be at least 2 (0 for the start of a range)."""
        symbol = self.shape_env.create_symbol(
            hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=start
        )
        return self.shape_env.create_symintnode(symbol, hint=hint)

    def translate(self, value: int | torch.SymInt) -> int | torch.SymInt:
        """The size `value` of the incoming graph as a size of the new environment."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if not expression.free_symbols:
            return int(expression)
        ordered = sorted(expression.free_symbols, key=str)
        return evaluate(expression, {s: self._size(value, s) for s in ordered})

    def _size(self, value: torch.SymInt, symbol: sympy.Symbol) -> int | torch.SymInt:
        known = {} if self.lengths is None else self.lengths.values
        if self.lengths is not None and self.lengths.fixed and symbol in self.lengths.others:
            return known[symbol]
        shared = self.lengths is not None and symbol in self.lengths.sequence
        if shared and self._length is not None:
            return self._length
        if symbol not in self._symbols:
            hint = known.get(symbol) or values_of(value)[symbol]
            if self.lengths is not None and symbol in self.lengths.samples:
                return self._size_of_batch(symbol, hint)
            longer = self.lengths.longer if self.lengths is not None and shared else 0
            self._symbols[symbol] = self.new(str(symbol), hint - longer)
            if shared:
                self._length = self._symbols[symbol] + longer
                return self._length
        return self._symbols[symbol]

    def _size_of_batch(self, symbol: sympy.Symbol, hint: int) -> torch.SymInt:
        """Batch sizes of inputs are one symbol, as lengths are (`sequence_length`, NOTE
        [one sequence length]).
        """
        if hint not in self._samples:
            self._samples[hint] = self.new(str(symbol), hint)
        self._symbols[symbol] = self._samples[hint]
        return self._symbols[symbol]


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with symbols of its own.

    Its cache of op results is off: with symbolic sizes it costs a third of the tracing time and saves little.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.cache_enabled = False
    return mode


@dataclass(frozen=True)
class Lengths:
    """The size symbols of a Dynamo graph by meaning.

    Attributes:
        sequence: symbols that stand for the sequence length; all have the same value.
        others: every other symbol in the sizes of the inputs.
        samples: of the others those that stand for the batch size: the first dim of inputs whose second dim
            is the sequence. Those that have the same value become one symbol.
        values: the value of each symbol in the call for which the graph is captured.
        fixed: the others are numbers to the passes, and not symbols.
        longer: rows that inputs have more than the sequence that is streamed: 1 where a function makes tokens
            and labels of one input, `ids[:, :-1]` and `ids[:, 1:]`; -1 where the symbol is that of inputs
            with a row for each prediction, and the tokens are one more.
        reason: why there is no sequence, if there is none.
    """

    sequence: frozenset[sympy.Symbol] = frozenset()
    others: frozenset[sympy.Symbol] = frozenset()
    samples: frozenset[sympy.Symbol] = frozenset()
    values: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    fixed: bool = False
    longer: int = 0
    reason: str | None = None


def values_of(size: torch.SymInt) -> dict[sympy.Symbol, int]:
    """The values that the symbols of a size had when it was traced."""
    env = size.node.shape_env
    return {s: int(env.backed_var_to_val[s]) for s in size.node.expr.free_symbols}


def evaluate_size(node: Node, size: Callable[[sympy.Expr], Any]) -> Any:
    """The number a SIZE node stands for, from the sizes of the step (`size` resolves an expression).

    Arithmetic on sizes is done again and not read off its symbolic value: it may be a float.
    """
    if node.op == "placeholder" or any(tensors_of(n) for n in node.all_input_nodes):
        return size(expression(node.meta["val"]))
    args = torch.fx.node.map_arg(node.args, lambda n: evaluate_size(n, size))
    return node.target(*args)  # type: ignore[operator]


def evaluate(size: sympy.Expr, values: Mapping[sympy.Symbol, Any]) -> Any:
    """A size from the values of its symbols, which may be symbolic integers themselves."""
    if size.is_Integer:
        return int(size)
    return sympy_interp(PythonReferenceAnalysis, dict(values), size)


def compiled(symbols: Sequence[sympy.Symbol], size: sympy.Expr) -> Callable[..., Any]:
    """A function of the values of `symbols`, ints: a size, or if a condition on sizes holds.

    NOTE [printed sizes]: the printer is PyTorch's, as the functions are. That of sympy leaves out the
    parentheses around what `Mod` is given, since PyTorch gives it another precedence.
    """
    try:
        printed = PythonPrinter().doprint(size)
        return eval(f"lambda {', '.join(map(str, symbols))}: {printed}", {"math": math, "torch": torch})
    except Exception:  # a function that it does not know
        return lambda *values: evaluate(size, dict(zip(symbols, values, strict=True)))
