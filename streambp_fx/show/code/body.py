"""The body of a printed function: the nodes of a graph, line by line, with shapes and source lines."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ...passes.graph.printing import WIDTH, Printer, Unprintable, fold, place, remark
from .names import ModelNames, Scope, op_name


@dataclass
class Body:
    """A printed graph.

    Attributes:
        lines: its statements, indented by four.
        results: what it returns, each as a name or a literal.
        refused: why it cannot be printed, if it cannot.
    """

    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    refused: str | None = None

    def reads(self, name: str) -> bool:
        """True if a statement or the result mentions a name."""
        code = [line.split("  # ")[0] for line in self.lines if not line.lstrip().startswith("#")]
        return re.search(rf"\b{name}\b", "\n".join([*code, *self.results])) is not None


class BodyPrinter:
    """Prints one graph.

    Args:
        graph: the graph. A node that tracing made has the name of the captured node that it comes from in
            `meta["origin"]`; a copy of a captured node has that node's name.
        printer: of sizes and expressions.
        model: how the model calls the values of the captured graph.
        scope: names in use in the function; those of new values are added.
        inputs: names (or expressions) of the graph's placeholders.
        copied: the graph is made of copies.
        subject: captured value that the graph is about, where its nodes have no source line.
    """

    def __init__(
        self,
        graph: Graph,
        printer: Printer,
        model: ModelNames,
        scope: Scope,
        inputs: dict[Node, str],
        copied: bool = False,
        subject: Node | None = None,
    ) -> None:
        self.copied, self.subject = copied, subject
        self.graph, self.printer, self.model, self.scope = graph, printer, model, scope
        self.names = dict(inputs)
        self.body = Body()
        self.located = _located(graph)
        self.last = {self._source(n): n for n in graph.nodes if not n.meta.get("backward")}
        self.where = ""

    def print(self) -> Body:
        """The body; one that says why where a node has no Python form."""
        node = None
        try:
            for node in self.graph.nodes:
                if node.op == "call_function":
                    self._statement(node)
                elif node.op == "output":
                    self.body.results = [self.printer.literal(v, self.name) for v in node.args[0]]
                elif node.op not in ("placeholder", "get_attr"):
                    raise Unprintable(f"it is a {node.op}")
        except Unprintable as reason:
            line = f" (in {self.where})" if self.where else ""
            self.body.refused = f"{node} cannot be printed: {reason}{line}"
        return self.body

    def name(self, node: Node) -> str:
        """An operand; sizes are written out where they are read.

        Raises:
            Unprintable: it has no name, and is no size that can be written out.
        """
        if node in self.names:
            return self.names[node]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and self.printer.knows(value):
            return self.printer.size(value)
        raise Unprintable("it reads a part of the graph that is no value")

    def _statement(self, node: Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and self.printer.knows(value):
            return  # written out where it is read
        self._comment(node)
        head, arguments, tail = self.printer.call(node, self.name)
        shape = self.printer.shape(value)
        if node.users:
            self.names[node] = self.scope.new(self._base(node))
            head = f"{self.names[node]} = {head}"
        self.body.lines += fold(4, head, arguments, tail, shape)

    def _comment(self, node: Node) -> None:
        """The source line, where it is another than that of the statement before."""
        located = self.located[node] or self.subject
        backward = "backward of " if located is not None and located.meta.get("backward") else ""
        text = f"{backward}{place(located)}" if located is not None else "made by the compiler"
        if text != self.where:
            self.body.lines.append(remark(4, text))
            self.where = text

    def _base(self, node: Node) -> str:
        source = self._source(node)
        if source is None or node.meta.get("backward") or self.last.get(source) is not node:
            return op_name(node)
        return self.model.of(source) if _rank(node) == _rank(source) else op_name(node)

    def _source(self, node: Node) -> Node | None:
        name = node.meta.get("origin", node.name if self.copied else None)
        return self.model.by_name.get(name) if node.op == "call_function" else None


def _rank(node: Node) -> int:
    """Number of dims: what is left of an op whose result nobody reads may be a mere view of its operand."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _located(graph: Graph) -> dict[Node, Node | None]:
    """For each node one that knows its source line: itself, what it is made of, or what is made of it."""
    found: dict[Node, Node | None] = {}
    for node in graph.nodes:
        found[node] = node if node.meta.get("stack_trace") else None
        if found[node] is None and node.op == "call_function":
            known = (found[n] for n in node.all_input_nodes)
            found[node] = next((n for n in known if n is not None), None)
    for node in reversed(list(graph.nodes)):
        if found[node] is None and node.op == "call_function":
            found[node] = next((found[u] for u in node.users if found.get(u) is not None), None)
    return found


def function(name: str, parameters: list[str], document: str, body: Body) -> str:
    """A printed function that returns a tuple; one that raises where its body cannot be printed."""
    lines = [*fold(0, f"def {name}(", parameters, "):"), *docstring(document)]
    if body.refused is None:
        lines += [*body.lines, *returned(body.results)]
    else:
        lines.append(remark(4, f"Not printed: {body.refused}"))
        lines += ["    raise NotImplementedError(", f"        {body.refused!r}", "    )"]
    return "\n".join(lines)


def docstring(text: str) -> list[str]:
    """A docstring, indented by four, wrapped."""
    if len(text) <= WIDTH - 10:
        return [f'    """{text}"""']
    wrapped = textwrap.wrap(text, WIDTH - 7)
    return [f'    """{wrapped[0]}', *(f"    {line}" for line in wrapped[1:]), '    """']


def targets(names: list[str]) -> str:
    """What a call that returns a tuple is assigned to."""
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def returned(results: list[str]) -> list[str]:
    """`return a, b`: a tuple, also of one and of none."""
    if not results:
        return ["    return ()"]
    if len(results) == 1:
        return [f"    return ({results[0]},)"]
    return fold(4, "return (", results, ")")
