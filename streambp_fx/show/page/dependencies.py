"""Which rows of a segment's input each of its values reads, composed op by op from what was proved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from html import escape
from typing import Any

import sympy
from torch.fx import Node

from ...passes.graph.facts import Facts, Kind, Reach, Segment, expression, tensors_of
from ...passes.graph.printing import Printer, place
from ...passes.graph.sources import source_line
from ...passes.s4_trace.carried_state import find_states

# The picture of a row interval: width, and the place of row i, in units of the drawing.
WIDTH, HEIGHT, ROW, WINDOW = 120, 14, 76, 28


@dataclass(frozen=True)
class Dependence:
    """The rows of a segment's input that row i of a value depends on.

    Attributes:
        reach: which rows.
        window: how many, if reach is WINDOW and the number is known.
    """

    reach: Reach = Reach.CONST
    window: Any = None

    def __or__(self, other: Dependence) -> Dependence:
        """Rows of one or the other."""
        if self.reach is not other.reach:
            return max(self, other, key=lambda d: d.reach)
        known = self.window is not None and other.window is not None
        return Dependence(self.reach, sympy.Max(self.window, other.window) if known else None)

    def through(self, reach: Reach, window: Any) -> Dependence:
        """Rows that are read where an op reads the rows `reach` of a value that depends on these."""
        if self.reach is Reach.CONST:
            return self
        if reach is Reach.WINDOW and self.reach is Reach.WINDOW:
            known = window is not None and self.window is not None
            return Dependence(reach, window + self.window - 1 if known else None)
        return max(self, Dependence(reach, window), key=lambda d: d.reach)

    def __str__(self) -> str:
        if self.reach is Reach.WINDOW:
            return f"a window of {'some' if self.window is None else self.window} rows"
        words = {Reach.CONST: "no rows", Reach.ROW: "its own row", Reach.CAUSAL: "all rows up to its own"}
        return words.get(self.reach, "all rows")


def dependences(facts: Facts, segment: Segment) -> dict[Node, Dependence]:
    """For each value of a segment, in graph order, the rows of the segment's input that it reads.

    The input are its streamed values, or for a segment without any the data that carry the sequence.
    """
    sources = segment.rows or [n for n in segment.whole if facts.carries(n)]
    found = dict.fromkeys(sources, Dependence(Reach.ROW, None))
    for node in segment.nodes:
        own = [found[n] for n in node.all_input_nodes if n in found]
        joined = Dependence()
        for one in own:
            joined |= one
        mixing = facts.mixings.get(node)
        if mixing is not None:
            for column in mixing.columns:
                joined |= found.get(column, Dependence()).through(mixing.reach, mixing.window)
        all_rows = node in facts.refusals or facts.kinds.get(node) is Kind.REDUCED
        found[node] = joined.through(Reach.FULL, None) if all_rows else joined
    return {n: found[n] for n in segment.nodes}


def glyph(dependence: Dependence) -> str:
    """A row interval as inline SVG: all rows as a line, those that are read thick, row i marked."""
    start, end = {
        Reach.CONST: (ROW, ROW),
        Reach.ROW: (ROW - 2, ROW + 2),
        Reach.WINDOW: (ROW - WINDOW, ROW + 2),
        Reach.CAUSAL: (2, ROW + 2),
        Reach.FULL: (2, WIDTH - 2),
    }[dependence.reach]
    return (
        f'<svg class="rows" role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>{escape(str(dependence))}</title>"
        f'<path class="all" d="M2 7H{WIDTH - 2}"/>'
        f'<rect class="read" x="{start}" y="3" width="{end - start}" height="8" rx="2"/>'
        f'<path class="row" d="M{ROW} 0V{HEIGHT}"/></svg>'
    )


#: Of the table of the values of a run.
HEADS = ("value", "op", "shape", "line of the model")


def dependences_html(facts: Facts, segment: Segment) -> str:
    """The values of a segment in runs that read the same rows: one line a run, which opens for its values."""
    printer = Printer(_names(facts, segment))
    chunked = segment.chunked and segment.mixings
    states = {s.node for s in find_states(facts, segment) if not s.by_chunk} if chunked else set()
    marks = dict.fromkeys(states, "state")
    marks |= {n: "state and output" if n in states else "output" for n in segment.outputs}
    runs = itertools.groupby(dependences(facts, segment).items(), key=lambda item: item[1])
    return "".join(_run(reads, [n for n, _ in values], marks, printer) for reads, values in runs)


def _run(reads: Dependence, nodes: list[Node], marks: dict[Node, str], printer: Printer) -> str:
    """A line for neighbouring values that read the same rows, and the table of them."""
    first, last = (f"<code>{escape(n.name)}</code>" for n in (nodes[0], nodes[-1]))
    values = first if len(nodes) == 1 else f"{len(nodes)} values, {first} to {last}"
    marked = "".join(f"; {marks[n]} <code>{escape(n.name)}</code>" for n in nodes if n in marks)
    head = "".join(f'<th scope="col">{h}</th>' for h in HEADS)
    rows = "".join(_value(n, reads, marks.get(n), printer) for n in nodes)
    return (
        f'<details class="reads"><summary>{glyph(reads)} <b>{escape(str(reads))}</b> '
        f'<span class="muted">{values}{marked}</span></summary>'
        f'<div class="scroll" tabindex="0"><table class="dependences"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _value(node: Node, dependence: Dependence, mark: str | None, printer: Printer) -> str:
    shown = "" if mark is None else f' <span class="mark">{mark}</span>'
    operands = ", ".join(n.name for n in node.all_input_nodes)
    return (
        f'<tr data-value="{escape(node.name)}" data-reach="{dependence.reach.name}" '
        f'data-window="{"" if dependence.window is None else dependence.window}">'
        f"<td><code>{escape(node.name)}</code>{shown}</td>"
        f'<td><code title="of {escape(operands)}">{escape(_op(node))}</code></td>'
        f"<td><code>{escape(printer.shape(node.meta.get('val')))}</code></td>"
        f'<td><code title="{escape(source_line(node))}">{escape(place(node))}</code></td></tr>'
    )


def _names(facts: Facts, segment: Segment) -> dict[sympy.Symbol, str]:
    """What sizes are called: the sequence length T, and the batch size B if there is no other symbol."""
    sizes = [d for n in segment.nodes for v in tensors_of(n) for d in v.shape]
    symbols = {s for size in sizes for s in expression(size).free_symbols}
    others = {facts.values.get(s, str(s)) for s in symbols if s != facts.sequence}
    return {s: "T" if s == facts.sequence else "B" if len(others) == 1 else str(s) for s in symbols}


def _op(node: Node) -> str:
    return str(node.target).removeprefix("aten.") if node.op == "call_function" else node.op
