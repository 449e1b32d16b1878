"""Graphs before and after a pass as text, for the golden files of the tests beside it.

The text of a graph depends on nothing but the model and the pass: inputs have their names in the model, sizes
are written out where they are read, and source lines have no numbers.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from graphs import WIDTH, in_backend
from torch import nn
from torch.fx import Graph, Node

from streambp_fx.passes import analyze
from streambp_fx.passes.graph.autograd_functions import CustomFunction
from streambp_fx.passes.graph.facts import CapturedGraph, Facts, PassError, expression, tensors_of
from streambp_fx.passes.graph.printing import Printer, Unprintable, fold, place
from streambp_fx.passes.graph.purity import is_impure
from streambp_fx.passes.graph.refusals import NotPureError
from streambp_fx.passes.graph.sources import path
from streambp_fx.passes.graph.subgraph import Subgraph
from streambp_fx.passes.graph.symbols import Lengths
from streambp_fx.passes.pipeline.log import masks_text, observed
from streambp_fx.passes.s1_capture.sequence_length import find_lengths
from streambp_fx.passes.s4_trace.program_inputs import Extent, input_names
from streambp_fx.passes.s4_trace.vjp import Traced
from streambp_fx.passes.s5_lower.lower import Lowered
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

CLASSES = 11


class Small(nn.Module):
    """A function of (module, inputs), with some parameters at hand: only those that it reads are captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: Any, labels: Any = None, more: Any = None) -> Any:
        return self.function(self, *[v for v in (ids, labels, more) if v is not None])

    def heads(self, x: torch.Tensor, count: int = 2) -> torch.Tensor:
        """(batch, sequence, width) -> (batch, heads, sequence, width of a head)."""
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def ids(batch: int = 2, length: int = 13) -> torch.Tensor:
    """Token ids."""
    return (torch.arange(batch * length) % CLASSES).view(batch, length)


def source(function: Callable[..., Any]) -> str:
    """The source of a function of a test."""
    return textwrap.dedent(inspect.getsource(function)).rstrip()


class Words:
    """Prints graphs. A node keeps its name from one print to the next, so that two prints can be compared.

    Args:
        symbols: names of the size symbols.
        names: names of inputs.
    """

    def __init__(self, symbols: Mapping[Any, str], names: Mapping[Node, str] | None = None) -> None:
        self.symbols, self.printer = symbols, Printer(symbols)
        self.names: dict[Node, str] = dict(names or {})

    def name(self, node: Node) -> str:
        """What a node is called; a size is written out."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and self.printer.knows(value):
            return self.printer.size(value)
        if node not in self.names:
            base = re.sub(r"_\d+$", "", node.name)
            taken, number = set(self.names.values()), 1
            while (name := base if number == 1 else f"{base}_{number}") in taken:
                number += 1
            self.names[node] = name
        return self.names[node]

    def graph(self, graph: Graph, note: Callable[[Node], str] = lambda node: "", dead: bool = True) -> str:
        """An op a line, with the shape of its value and a note, under the line of the model that made it.

        Args:
            dead: ops that nobody reads are shown, and where something is detached.
        """
        lines, where = self._inputs(graph), ""
        for node in graph.nodes if dead else self._live(graph):
            if node.op == "output":
                values = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
                lines += fold(0, "return ", [self.printer.literal(v, self.name) for v in values], "")
            if node.op != "call_function" or isinstance(node.meta.get("val"), torch.SymInt):
                continue
            line = code(node)
            if line and line != where:
                lines.append(f"# {line}")
                where = line
            lines += self._statement(node, note(node))
        return "\n".join(lines).rstrip()

    def _live(self, graph: Graph) -> list[Node]:
        """Nodes that somebody reads, and those that change something. What is detached keeps its name."""
        live: set[Node] = set()
        for node in reversed(graph.nodes):
            if is_impure(node) or not live.isdisjoint(node.users):
                live.add(node)
        shown = []
        for node in (n for n in graph.nodes if n in live):
            if node.target is torch.ops.aten.detach.default:
                self.names[node] = self.name(node.args[0])
            else:
                shown.append(node)
        return shown

    def _inputs(self, graph: Graph) -> list[str]:
        """Name and shape of each input that is a tensor, in the order of the names."""
        nodes = [n for n in graph.nodes if n.op == "placeholder" and tensors_of(n)]
        return sorted(f"{self.name(n)}: {self.printer.shape(n.meta['val'])}" for n in nodes)

    def _statement(self, node: Node, note: str) -> list[str]:
        try:
            head, arguments, tail = self.printer.call(node, self.name)
        except Unprintable:
            head, arguments, tail = f"{node.target.__name__}(", list(map(str, node.args)), ")"  # type: ignore[union-attr]
        if isinstance(node.target, CustomFunction):  # Dynamo puts its inputs into an order of its own
            tensors = sorted(self.name(n) for n in node.all_input_nodes if tensors_of(n))
            head, arguments = "custom_function(", tensors
        comment = ", ".join(filter(None, (self.printer.shape(node.meta.get("val")), note)))
        return fold(0, f"{self.name(node)} = {head}" if node.users else head, arguments, tail, comment)


def code(node: Node) -> str:
    """The line of a test that made a node, "" for one of another file."""
    file, _, rest = place(node).partition(".py:")
    line = rest.partition(": ")[2] if re.fullmatch(r"test_\w+|graphs|golden_graphs", file) else ""
    return f"backward of {line}" if line and node.meta.get("backward") else line


def words_of(result: CapturedGraph | Facts) -> Words:
    """Words for a captured graph: T is the sequence length, B and so on are other sizes."""
    inputs = [n for n in result.module.graph.nodes if n.op == "placeholder"]
    sizes = [expression(s) for n in inputs for value in tensors_of(n) for s in value.shape]
    symbols = dict.fromkeys(s for size in sizes for s in sorted(size.free_symbols, key=str))
    others = [s for s in symbols if s != result.sequence]
    names = {s: "BCDEFGH"[k] for k, s in enumerate(others)} | {result.sequence: "T"}
    return Words({s: names[s] for s in symbols}, {n: path(n) for n in inputs})


class Stages:
    """What the passes made of a model, one after the other.

    Attributes:
        programs: text of the graph after each pass that ran.
        masks: what was known of masks after "axes" and after each later pass.
        facts: after the last pass that ran; a captured graph if none gave facts.
        refused: why a pass refused the model, "" if none did.
    """

    def __init__(self) -> None:
        self.programs: dict[str, str] = {}
        self.masks: dict[str, str] = {}
        self.facts: Any = None
        self.refused = ""
        self.words: Words | None = None

    def observe(self, name: str, result: CapturedGraph | Facts, seconds: float) -> None:
        if self.words is None:
            self.words = words_of(result)
        self.facts = result
        self.programs[name] = self.words.graph(result.module.graph)
        if isinstance(result, Facts):
            self.masks[name] = without_places(masks_text(result))

    def change(self, before: str, after: str) -> str:
        """The program after one pass, and what another one changed of it."""
        first, second = self.programs[before], self.programs[after]
        return f"{first}\n\n{difference(first, second, after)}"


def stages(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    open_dims: tuple[int | tuple[int, ...], ...] = (1,),
    find: Callable[[torch.fx.GraphModule], Lengths] | None = None,
    logits: str = "keep",
) -> Stages:
    """Run all passes on a model, and keep what each of them made of it.

    Args:
        open_dims: of each input the dim, or the dims, whose size is a symbol.
        find: which sizes are the sequence; None: the only one that is open.
        logits: what becomes of wide outputs.
    """
    found = Stages()

    def run(graph: torch.fx.GraphModule, examples: list[Any]) -> None:
        lengths = None if find is None else find(graph)
        with observed(found.observe):
            try:
                analyze(graph, examples, lengths, logits)
            except PassError as error:
                found.refused = _reason(error)

    in_backend(run, module, *inputs, open_dims=open_dims)
    return found


def with_batch(function: Callable[..., Any], *inputs: Any, **options: Any) -> Stages:
    """Run all passes on a small model of inputs (batch, sequence), both sizes of which are open."""
    dims = ((0, 1),) * len(inputs)
    return stages(Small(function), *inputs, open_dims=dims, find=find_lengths, **options)


def part_text(found: Stages, part: Subgraph) -> str:
    """A part of a graph, in the names of the graph that it is taken from."""
    assert found.words is not None
    named = {n.name: found.words.name(n) for n in found.facts.nodes}
    graph = part.module.graph
    words = Words(found.words.symbols, {n: named[n.name] for n in graph.nodes if n.name in named})
    return words.graph(graph)


def _reason(error: PassError) -> str:
    cause = error.cause
    reason = cause.reason if isinstance(cause, NotPureError) else str(cause)
    line = code(cause.node) if isinstance(cause, NotPureError) and cause.node is not None else ""
    return f"refused by {error.name}: {reason}" + (f"\n# {line}" if line else "")


def difference(before: str, after: str, name: str) -> str:
    """What changed from one text to another, a line of context around it."""
    if before == after:
        return f"# ---- {name} changes nothing"
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    shown = ["@@" if line.startswith("@@") else line for line in list(lines)[2:]]
    return "\n".join([f"# ---- changed by {name}", *shown[1:]])


def without_places(text: str) -> str:
    """A text whose source lines have no path and no number."""
    return re.sub(r"[\w./<>-]+\.py:\d+: ", "", text)


def sections(*parts: tuple[str, str] | str) -> str:
    """Texts below each other, each under its title."""
    texts = [p if isinstance(p, str) else f"# ---- {p[0]}\n{p[1]}" for p in parts]
    return "\n\n".join(t for t in texts if t)


def listed(values: Iterable[Any]) -> str:
    """Values with commas between them, or a dash for none."""
    return ", ".join(map(str, values)) or "-"


# ---- programs of chunks

# Before 2.13 PyTorch's Python code for composite ops is traced (`versions.differences.symbolic_sizes`).
needs_symbols = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="traces of older versions are others"
)

# Four rows, with eight columns before them or none, of a sequence of 16: symbols where they are not 0.
LATER, FIRST, ALL = Extent(4, 8, 0, 16), Extent(4, 0, 0, 16), Extent(4, 8, 0, 16, full=True)


def traced(programs: SegmentPrograms, kind: str, extent: Extent = LATER) -> Traced:
    """The program of a kind for such chunks, before it is lowered."""
    symbols = [programs.facts.values.get(s, 2) for s in programs.symbols]
    return programs.traced(kind, frozenset(), extent, [*extent.sizes, 0, *symbols])


def lowered(programs: SegmentPrograms, kind: str, extent: Extent = LATER) -> Lowered:
    """The program of a kind for such chunks, as it is run."""
    symbols = [programs.facts.values.get(s, 2) for s in programs.symbols]
    return programs.get(kind, frozenset(), extent, [*extent.sizes, 0, *symbols])


def traced_text(programs: SegmentPrograms, kind: str, extent: Extent = LATER) -> str:
    """The program of a kind before it is lowered, without the ops that nobody reads."""
    program = traced(programs, kind, extent)
    inputs = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    known = names_of_inputs(programs)
    names = [known.get(name, name) for name in input_names(programs.slots(kind))]
    words = Words(program.guards.names, dict(zip(inputs, names, strict=True)))
    return words.graph(program.module.graph, dead=False)


def lowered_words(programs: SegmentPrograms, program: Lowered) -> Words:
    """Words for a program as it is run."""
    inputs = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    known = names_of_inputs(programs)
    return Words(program.sizes, {n: known.get(n.name, n.name) for n in inputs})


def lowered_text(programs: SegmentPrograms, program: Lowered) -> str:
    """A program as it is run."""
    return lowered_words(programs, program).graph(program.module.graph)


def names_of_inputs(programs: SegmentPrograms) -> dict[str, str]:
    """What inputs of programs are called where they are called by inputs of the captured graph."""
    found = [b for kind in ("joint", "forward", "state_joint") for b in programs.slots(kind).tensors]
    given = [b for b in found if b.node is not None and b.node.op == "placeholder"]
    return {b.name: b.name.replace(b.node.name, path(b.node)) for b in given}
