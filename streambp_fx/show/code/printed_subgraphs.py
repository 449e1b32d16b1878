"""Subgraphs as printed functions: the whole values, the epilogue, a segment that runs unchunked."""

from __future__ import annotations

from ...passes.graph.facts import Kind
from ...passes.graph.subgraph import Subgraph
from .body import BodyPrinter, function
from .context import Context
from .names import Scope


class PrintedSubgraph:
    """A subgraph as a printed function.

    Args:
        context: what is printed.
        part: the subgraph.
        name: of the function.
        document: its docstring.

    Attributes:
        values: captured values that it takes.
        sizes: names of the sizes that it takes after them.
        text: the function.
    """

    def __init__(self, context: Context, part: Subgraph, name: str, document: str) -> None:
        self.context, self.part, self.name = context, part, name
        scope = Scope(context.globals.taken)
        placeholders = [n for n in part.module.graph.nodes if n.op == "placeholder"]
        self.names, self.values = {}, []
        for placeholder, node in zip(placeholders, part.inputs, strict=True):
            size = context.facts.kinds[node] is Kind.SIZE
            self.names[placeholder] = context.size(node) if size else scope.new(context.model.of(node))
            self.values += [] if size else [node]
        graph = part.module.graph
        self.body = BodyPrinter(graph, context.printer, context.model, scope, self.names, copied=True).print()
        own = [n for n, node in zip(self.names.values(), part.inputs, strict=True) if node in self.values]
        self.sizes = [s for s in context.symbols.values() if self.body.reads(s)]
        self.text = function(name, [*own, *self.sizes], document, self.body)
