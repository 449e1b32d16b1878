"""What the passes tell the log: `TORCH_LOGS="streambp_fx.passes"`, with a `+` before it the programs too.

With `TORCH_TRACE=DIR` the programs also go to PyTorch's structured trace, which `tlparse` shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
from torch._logging import trace_structured
from torch.fx import Node

from ..graph.facts import CapturedGraph, Facts, Kind, expression, tensors_of
from ..graph.printing import Printer, Unprintable, place
from ..graph.sources import path

log = logging.getLogger("streambp_fx.passes")
Observer = Callable[[str, Any, float], None]
Listener = Callable[[float], None]
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("streambp_observers", default=())
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("streambp_listeners", default=())


@contextmanager
def observed(observer: Observer, listener: Listener | None = None) -> Iterator[None]:
    """Within: `observer` is called with (name, result, seconds) right after each pass.

    The result is what the pass gives: a captured graph, facts, a chunk program or a step. Passes change the
    graph in place, so what is wanted of it must be taken during the call.

    Args:
        listener: called now and then while a graph is traced, with the share that has been: from 0 to 1.
    """
    token = _observers.set((*_observers.get(), observer))
    more = () if listener is None else (listener,)
    other = _listeners.set((*_listeners.get(), *more))
    try:
        yield
    finally:
        _listeners.reset(other)
        _observers.reset(token)


def tell_share(share: float) -> None:
    """That share of a graph has been traced."""
    for listener in _listeners.get():
        listener(share)


def report(name: str, result: Any, seconds: float) -> None:
    """One line on a pass that ran: how long, and what there is now.

    Passes over the captured graph are reported at INFO. Those over chunk programs and steps, which run many
    times, at DEBUG.
    """
    for observer in _observers.get():
        observer(name, result, seconds)
    captured = isinstance(result, CapturedGraph | Facts)
    level = logging.INFO if captured else logging.DEBUG
    log.log(level, "%-10s %6.2f s  %s", name, seconds, _counts(result) if captured else result.title)
    text = lambda: program_text(result) if captured else str(result)  # noqa: E731
    if log.isEnabledFor(logging.DEBUG):
        log.debug("after %s:\n%s", name, text())
    if captured:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"streambp_after_{name}", "encoding": "string"},
            payload_fn=text,
        )


def _counts(result: CapturedGraph | Facts) -> str:
    nodes = list(result.module.graph.nodes)
    text = f"{sum(n.op == 'call_function' for n in nodes)} ops"
    if not isinstance(result, Facts):
        return text
    streamed = sum(k is Kind.STREAM for k in result.kinds.values())
    text += f", {streamed} streamed, {len(result.mixings)} read along the sequence"
    if result.refusals:
        text += f", {len(result.refusals)} refused"
    if result.segments:
        distinct = len({s.signature for s in result.segments if s.signature})
        text += f"; {len(result.segments)} segments" + (f", {distinct} distinct" if distinct else "")
    return text


def program_text(result: CapturedGraph | Facts) -> str:
    """The program after a pass as Python: an op a line, under the line of the model that it comes from.

    Beside it stands what is known about its value: shape and dtype; then its kind, the roles of its dims, how
    far it reads, and why it was refused. T is the sequence length.
    """
    facts = result if isinstance(result, Facts) else None
    borders = {s.nodes[0]: s for s in facts.segments if s.nodes} if facts is not None else {}
    printer, lines, where = Printer(_symbols(result)), [], ""
    for node in result.module.graph.nodes:
        if node in borders:
            lines.append(f"# ---- segment {borders[node].index} ({borders[node].kind})")
        line = place(node) if node.op == "call_function" else ""
        if line and line != where:
            lines.append(f"# {line}")
            where = line
        notes = [n for n in (printer.shape(node.meta.get("val")), *_proved(facts, node)) if n]
        lines.append(_line(printer, node) + (f"  # {', '.join(notes)}" if notes else ""))
    return "\n".join(lines)


def _line(printer: Printer, node: Node) -> str:
    if node.op == "placeholder":
        return f"{node.name} = inputs[{path(node)!r}]"
    if node.op == "output":
        return f"return {', '.join(str(v) for v in node.args[0])}"
    try:
        head, arguments, tail = printer.call(node, lambda n: n.name)
    except Unprintable:
        return node.format_node() or node.name
    return f"{node.name} = {head}{', '.join(arguments)}{tail}"


def _symbols(result: CapturedGraph | Facts) -> dict[sympy.Symbol, str]:
    values = [v for n in result.module.graph.nodes for v in tensors_of(n)]
    found = {s for v in values for size in v.shape for s in expression(size).free_symbols}
    return {s: "T" if s == result.sequence else str(s) for s in found}


def _proved(facts: Facts | None, node: Node) -> Iterator[str]:
    """What the passes know about a node, in words."""
    if facts is None or node not in facts.kinds:
        return
    layout = facts.layouts.get(node)
    roles = ", ".join("-" if a is None else str(a) for a in layout) if layout and any(layout) else ""
    yield facts.kinds[node].value + (f" [{roles}]" if roles else "")
    if node in facts.mixings:
        yield f"reads {facts.mixings[node].reach.name}"
    if node in facts.refusals:
        yield f"refused: {facts.refusals[node]}"


def masks_text(facts: Facts) -> str:
    """What was proved of the masks: the ops that read along the sequence, and under which predicate they do.

    Row i, of batch entry b, attends to column j where the predicate holds.
    """
    lines = []
    for mixing in facts.mixings.values():
        reach = mixing.reach.name if mixing.window is None else f"{mixing.reach.name} of {mixing.window} rows"
        lines.append(f"{mixing.node.name} ({mixing.node.target}) reads {reach}")
        known = facts.masks.get(mixing.mask) if mixing.mask is not None else None
        if known is not None and mixing.mask is not None:
            lines.append(f"    under {mixing.mask.name}: {known}")
        if place(mixing.node):
            lines.append(f"    # {place(mixing.node)}")
    return "\n".join(lines) or "no op reads along the sequence"
