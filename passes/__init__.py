"""The compiler: an ordered list of passes over one captured graph.

    capture      Dynamo graph -> one pre-dispatch ATen graph, symbolic in the sequence length
    normalize    functional form, no no-ops, grouped heads handed to the kernel, losses split into rows
    axes         which dim of each value carries the sequence, by op rules (`rules/`), never by size
    footprints   which rows a row reads: [i, i], a window, [0, i] or all; proved from the masks (`masks`)
    segment      cuts where the fewest bytes are alive, so that a segment holds one level of mixing
    share        identical segments share one set of programs
    objective    is the loss linear in its rows: one sweep over the head, or two
    chunk        a segment as a program over one chunk: rows -> state -> rows (`emit`, `attention`)
    vjp          the chunk program and its joint VJP as explicit FX graphs, symbolic in chunk and prefix
    lower        FX graph -> Python on eager kernels, parameter gradients accumulated in place

The first six run when a graph is captured (`analyze`), `objective` when the schedule is built. The last
three run when a segment first meets a new kind of chunk, once for all identical segments; what they make is
called by `streambp_fx.runtime`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from .axes import axes
from .capture import CapturedGraph, capture
from .footprints import footprints
from .ir import Facts, shape_of, tensors_of
from .normalize import normalize
from .segment import segment
from .share import share

log = logging.getLogger(__name__)

PASSES: list[tuple[str, Callable[[Facts], Facts]]] = [
    ("footprints", footprints),
    ("segment", segment),
    ("share", share),
]


class PassError(Exception):
    """A pass failed; `name` says which."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"pass {name!r} failed: {type(cause).__name__}: {cause}")
        self.name, self.cause = name, cause


def analyze(module: torch.fx.GraphModule, example_inputs: Sequence[Any], one_length: bool = False) -> Facts:
    """Run the passes from capture to share on what Dynamo hands to a backend.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        one_length: all dynamic sizes of the inputs that are equal are the one sequence length.

    Raises:
        PassError: a pass failed.
    """
    captured: CapturedGraph = _timed("capture", capture, module, example_inputs, one_length)
    captured = _timed("normalize", normalize, captured)
    facts: Facts = _timed("axes", axes, captured, sequence_symbol(captured))
    for name, function in PASSES:
        facts = _timed(name, function, facts)
    return facts


def sequence_symbol(captured: CapturedGraph) -> sympy.Symbol | None:
    """The symbol of the sequence length: the only one in the sizes of input tensors, or None.

    Strides have symbols of their own where an input is a slice of something longer; they do not count.
    """
    inputs = [n for n in captured.module.graph.nodes if n.op == "placeholder" and tensors_of(n)]
    symbols = {s for n in inputs for size in shape_of(n) for s in size.free_symbols}
    return next(iter(symbols)) if len(symbols) == 1 else None


def _timed(name: str, function: Callable[..., Any], *args: Any) -> Any:
    start = time.perf_counter()
    try:
        result = function(*args)
    except Exception as error:
        raise PassError(name, error) from error
    log.info("%-10s %.2f s", name, time.perf_counter() - start)
    return result
