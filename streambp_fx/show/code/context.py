"""What all parts of a printed program share: names, sizes, and what is known of the masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ...passes.graph.facts import Facts, Kind, Mask, Reach, expression, tensors_of
from ...passes.graph.printing import Printer
from ...passes.graph.subgraph import Subgraph
from ...passes.graph.symbols import evaluate_size
from ...passes.graph.tracing import trace
from ...passes.masks.at_run_time import data_condition, first_column_condition
from ...passes.s2_prove.footprints import mask_facts
from ...runtime.executor import Executor
from ...runtime.segments.segment_runner import SegmentRunner
from .body import BodyPrinter, function
from .names import ModelNames, Scope


@dataclass
class Test:
    """A question that the runtime asks the data once a step: is a mask plain causal, does each row see a row.

    Attributes:
        answer: known beforehand, or None if the printed step has to ask.
        name: of the answer in the printed step; `test_` before it is the function that asks.
        arguments: captured values that the function takes, and sizes.
        text: of the function.
        fixed: the answer was found for one sequence length, so the step checks it.
    """

    answer: bool | None
    name: str = ""
    arguments: list[Node | str] = field(default_factory=list)
    text: str = ""
    fixed: bool = False


class Context:
    """The compiled graph that is printed.

    Args:
        executor: its executor, with eager bodies.
        tokens: the sequence length that the programs are printed for.
    """

    def __init__(self, executor: Executor, tokens: int) -> None:
        self.executor, self.facts, self.tokens = executor, executor.facts, tokens
        self.model = ModelNames(self.facts)
        self.values = {s: self.facts.values.get(s, 2) for s in _symbols(self.facts)}
        if self.facts.sequence is not None:
            self.values[self.facts.sequence] = tokens
        self.rows = executor.options.rows
        self.loss_rows = executor.options.loss_rows(executor.sequences(self.values))
        self.symbols = self._name_symbols()
        self.device = _device(self.facts)
        self.printer = Printer(self.symbols, self.device)
        self.globals = Scope(self.symbols.values())
        self.plain = {m: self._test(m, "is_plain", data_condition) for m in executor.parts.masks}
        self.open = {
            m: self._test(m, "shows_every_row_a_row", first_column_condition) if additive else Test(True)
            for m, additive in executor.parts.masks.items()
        }
        for mask in executor.parts.masks:
            known = mask_facts(self.facts, mask)
            if not known.plain_without_data or known.has_bias:
                self.plain[mask] = Test(False)

    def _name_symbols(self) -> dict[sympy.Symbol, str]:
        """T for the sequence length, B for the batch size where it is a symbol, else Dynamo's names."""
        names = {s: str(s) for s in _symbols(self.facts)}
        for position, dim, symbol, _ in self.executor.sizes_at:
            if dim != 0 or symbol is None or "B" in names.values():
                continue
            if self.model.kind(self._input(position)) == "input":
                names[symbol] = "B"
        if self.facts.sequence is not None:
            names[self.facts.sequence] = "T"
        return names

    def _input(self, position: int) -> Node:
        return self.executor.placeholders[position]

    def always_full(self, runner: SegmentRunner) -> bool:
        """True if some row of a segment may read all rows, whatever the data says."""
        answers = (self.open[m].answer for m in runner.masks if m in self.open)
        return runner.segment.reach is Reach.FULL or (not runner.segment.chained and False in answers)

    def may_be_full(self, runner: SegmentRunner) -> bool:
        """True if the data may say so of some row."""
        asked = any(self.open[m].answer is None for m in runner.masks if m in self.open)
        return self.always_full(runner) or (not runner.segment.chained and asked)

    def sample(self, expr: sympy.Expr) -> int:
        """A size at the printed sequence length."""
        return int(expr.subs(self.values))

    def size(self, node: Node) -> str:
        """A SIZE node as an expression of T, B and so on."""
        value = node.meta["val"]
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self.printer.size(value)
        return repr(evaluate_size(node, self.sample))

    def _test(self, mask: Mask, word: str, condition: Callable[..., Any]) -> Test:
        known = mask_facts(self.facts, mask)
        nodes = list(dict.fromkeys(known.linear.values()))
        found: list[Any] = []

        def ask(*values: Any) -> list[Any]:
            found[:] = [condition(known, dict(zip(nodes, values, strict=True)).__getitem__)]
            return found

        fakes = [n.meta["val"] for n in nodes]
        if not fakes:
            return Test(bool(condition(known, {}.__getitem__)))
        with fakes[0].fake_mode, torch.no_grad():
            graph = trace(ask, *fakes).graph
        if isinstance(found[0], bool):
            return Test(found[0])
        named = "_".join(self.model.of(n) for n in mask.nodes)
        name = self.globals.new(f"{named}_{word}")
        answer = self._of_sizes_alone(nodes, lambda fetch: bool(condition(known, fetch)))
        arguments, text = self._function(f"test_{name}", nodes, graph, mask)
        return Test(answer, name, arguments, text, fixed=answer is not None)

    def _function(
        self, name: str, nodes: list[Node], graph: Graph, mask: Mask
    ) -> tuple[list[Node | str], str]:
        scope = Scope(self.globals.taken)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        names = [scope.new(self.model.of(n)) for n in nodes]
        inputs = dict(zip(placeholders, names, strict=True))
        body = BodyPrinter(graph, self.printer, self.model, scope, inputs, subject=mask.nodes[0]).print()
        sizes = [s for s in self.symbols.values() if body.reads(s)]
        return [*nodes, *sizes], function(name, [*names, *sizes], "Asked of the data once a step.", body)

    def _of_sizes_alone(self, nodes: list[Node], ask: Callable[..., bool]) -> bool | None:
        """The answer, if what it depends on is made of sizes: positions that the model counts itself."""
        part = Subgraph(self.facts, nodes, set())
        if any(self.facts.kinds[n] is not Kind.SIZE for n in part.inputs) or self.device.type != "cpu":
            return None
        with torch.no_grad():
            values = part.module(*(evaluate_size(n, self.sample) for n in part.inputs))
        return ask(dict(zip(nodes, values, strict=True)).__getitem__)


def _symbols(facts: Facts) -> list[sympy.Symbol]:
    sizes: list[int | torch.SymInt] = [size for n in facts.nodes for v in tensors_of(n) for size in v.shape]
    sizes += [v for n in facts.nodes if isinstance(v := n.meta.get("val"), torch.SymInt)]
    found = {s for size in sizes for s in expression(size).free_symbols}
    return sorted(found, key=str)


def _device(facts: Facts) -> torch.device:
    """The device that most values are on."""
    devices = [v.device for n in facts.nodes for v in tensors_of(n)]
    return max(set(devices), key=devices.count) if devices else torch.device("cpu")
