"""capture: a Dynamo graph -> one pre-dispatch ATen FX graph, symbolic in the sequence length.

At the pre-dispatch level `linear`, `layer_norm`, `scaled_dot_product_attention` and
`cross_entropy_loss` are still single nodes, so a decoder is some 40 distinct ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .custom_gradient import Retrace


@dataclass
class CapturedGraph:
    """One captured forward.

    Attributes:
        module: pre-dispatch ATen graph; every node has `meta["val"]` (a fake tensor or a SymInt).
        parameters: placeholders that are parameters of the model, with the name Dynamo gives them.
        differentiable: placeholders that require a gradient.
        example_sizes: hint of each size symbol at capture time.
    """

    module: torch.fx.GraphModule
    parameters: dict[torch.fx.Node, str] = field(default_factory=dict)
    differentiable: set[torch.fx.Node] = field(default_factory=set)
    example_sizes: dict[sympy.Symbol, int] = field(default_factory=dict)


class SymbolTable:
    """Symbolic integers of a fresh ShapeEnv, one for each symbol of the graph that came in."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.shape_env = shape_env
        self._symbols: dict[sympy.Symbol, torch.SymInt] = {}
        self._lengths: dict[int, torch.SymInt] = {}
        self.hints: dict[sympy.Symbol, int] = {}

    def new(self, name: str, hint: int, start: bool = False) -> torch.SymInt:
        """A fresh symbolic integer, assumed to be at least 2 (0 for the start of a range)."""
        symbol = self.shape_env.create_symbol(
            hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=start
        )
        value = self.shape_env.create_symintnode(symbol, hint=hint)
        if isinstance(symbol, sympy.Symbol):
            self.hints[symbol] = hint
        return value

    def unify(self, value: int | torch.SymInt) -> None:
        """Give a size of an input the symbol of the other inputs' sizes that equal it.

        NOTE [one sequence length]: Dynamo gives each input's length a symbol of its own, and they stay apart
        if the model never demands that they be equal. Here they are one; that they are equal in every later
        call is checked at run time.
        """
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            hint = _hint(value, value.node.expr)
            if hint not in self._lengths:
                self._lengths[hint] = self._symbols.setdefault(
                    value.node.expr, self.new(str(value.node.expr), hint)
                )
            self._symbols[value.node.expr] = self._lengths[hint]

    def translate(self, value: int | torch.SymInt) -> int | torch.SymInt:
        """The size `value` of the incoming graph as a size of the new environment."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if not expression.free_symbols:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                hint = int(value.node.shape_env.var_to_hint_override.get(symbol, 0)) or _hint(value, symbol)
                self._symbols[symbol] = self.new(str(symbol), hint)
        if isinstance(expression, sympy.Symbol):
            return self._symbols[expression]
        ordered = sorted(expression.free_symbols, key=str)
        return sympy.lambdify(ordered, expression)(*(self._symbols[s] for s in ordered))


def _hint(value: torch.SymInt, symbol: sympy.Symbol) -> int:
    env = value.node.shape_env
    known = getattr(env, "backed_var_to_val", None)
    if known is None:
        known = env.var_to_val
    return int(known[symbol])


def _fake_input(value: object, table: SymbolTable, mode: FakeTensorMode) -> object:
    if isinstance(value, torch.SymInt):
        return table.translate(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [table.translate(s) for s in value.shape]  # sizes get their symbols first
    stride = [table.translate(s) for s in value.stride()]
    with mode:
        fake = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return fake.requires_grad_(value.requires_grad)


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with symbols of its own.

    Its cache of op results is off: with symbolic sizes it costs a third of the tracing time and saves little.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.cache_enabled = False
    return mode


def capture(
    module: torch.fx.GraphModule, example_inputs: Sequence[object], one_length: bool = False
) -> CapturedGraph:
    """Retrace a Dynamo graph to pre-dispatch ATen under a fake mode of its own.

    NOTE [fresh fake mode]: Dynamo's fake inputs belong to Dynamo's mode and cannot be mixed with
    another. The inputs are made anew, each Dynamo symbol mapped to one new symbol, so that sizes that
    were equal stay equal and no guard on them appears.

    Args:
        module: what Dynamo hands to a backend.
        example_inputs: its inputs (real or fake tensors, ints, SymInts).
        one_length: inputs whose dynamic sizes are equal share one symbol.
    """
    mode = new_fake_mode()
    assert mode.shape_env is not None
    table = SymbolTable(mode.shape_env)
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    examples = [n.meta.get("example_value", e) for n, e in zip(nodes, example_inputs, strict=True)]
    for value in examples if one_length else ():
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            table.unify(size)
    inputs = [_fake_input(value, table, mode) for value in examples]
    with mode, fx_traceback.preserve_node_meta():
        traced = make_fx(Retrace(module).run, pre_dispatch=True, tracing_mode="real")(*inputs)
    result = CapturedGraph(traced, example_sizes=table.hints)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for old, new, example in zip(nodes, placeholders, examples, strict=True):
        if not isinstance(example, torch.Tensor):
            continue
        if isinstance(example, torch.nn.Parameter):
            result.parameters[new] = source_name(old)
        if example.requires_grad:
            result.differentiable.add(new)
    return result


def source_name(placeholder: torch.fx.Node) -> str:
    """Readable name of a Dynamo input: `model.layers.0.mlp.up_proj.weight`, or the argument's name."""
    argument = placeholder.meta.get("grapharg")
    name = argument.source.name if argument is not None else placeholder.name
    name = name() if callable(name) else name
    for table in ("_modules", "_parameters", "_buffers"):
        name = name.replace(f".{table}[", "[")
    parts = [p.strip("'\"") for p in name.replace("]", "").replace("L[", "").split("[")]
    return ".".join(p for p in parts if p not in ("self", "args", "kwargs", "model"))


def source_line(node: torch.fx.Node) -> str:
    """`file.py:123: code` of the model's source line that made `node`, or its name if unknown."""
    lines = [line.rstrip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for position in range(len(lines) - 1, -1, -1):
        text = lines[position].strip()
        if text.startswith("File "):
            file, line = text.split('"')[1], text.split("line ")[1].split(",")[0]
            code = lines[position + 1].strip() if position + 1 < len(lines) else ""
            return f"{file}:{line}: {code}"
    return node.name
