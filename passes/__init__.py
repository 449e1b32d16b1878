"""The compiler: an ordered list of passes over one captured graph, by stage::

    s1_capture
    sequence_length      which sizes of the inputs are the sequence length
    capture              Dynamo graph -> one pre-dispatch ATen graph, symbolic in the sequence length; changes
                         in place become functional by PyTorch's functionalization
    autocast             the casts that autocast makes inside ops, as ops
    normalize            no dead code, no no-ops, grouped heads handed to the kernel, losses split into rows

    s2_prove
    axes                 which dim of each value carries the sequence, by op rules (`rules/`), never by size
    footprints           which rows a row reads: [i, i], a window, [0, i] or all; from the masks (`masks/`)
    linear_loss          is the loss linear in its rows: one sweep over the head, or two
    independent_samples  are the samples of a batch independent: may some of them be run without the others

    s3_cut
    widen_late           wide values made as late as they can be
    lazy_outputs         wide values next to a loss (logits) are computed when somebody reads them
    segment              cuts where the fewest bytes are alive, so that a segment holds one level of mixing
    signatures           identical segments share one set of programs
    policy               what is kept for the backward besides a segment's inputs, and where it lies

    s4_trace
    chunk_program        a segment as a program over a chunk: rows -> state -> rows (`chunk_ops`,
                         `prefix_attention`, `attention_kernels`)
    vjp                  the chunk program and its joint VJP as FX graphs, symbolic in chunk and prefix

    step                 the chunk programs of a segment in loops over its chunks, as instructions; checked

    s5_lower
    simplify             the same values in fewer passes over memory (eager kernels only)
    reorder              ops run when somebody needs what they make (eager kernels only)
    rematerialize        elementwise values are made again after the peak of a program (eager kernels only)
    write_in_place       ops write over operands that nobody reads any more (eager kernels only)
    workspace            the logits of all chunks in one place, in a sweep over the head (eager kernels, CPU)
    lower                FX graph -> Python on eager kernels, parameter gradients accumulated in place

Those down to `signatures` run when a graph is captured (`analyze`), `linear_loss` when the schedule is built,
and `independent_samples` when a batch has padding or a schedule is printed. The others run when a segment
first meets a new kind of chunk, once for all identical segments; what they make is called by
`streambp_fx.runtime`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .graph.facts import CapturedGraph, Facts, PassError, tensors_of
from .graph.pass_log import report
from .graph.symbols import Lengths
from .s1_capture import split_losses  # noqa: F401  (registers its rewrites)
from .s1_capture.autocast import autocast
from .s1_capture.capture import capture
from .s1_capture.normalize import normalize
from .s2_prove.axes import axes
from .s2_prove.footprints import footprints
from .s3_cut.lazy_outputs import outputs
from .s3_cut.segment import segment
from .s3_cut.signatures import share
from .s3_cut.widen_late import order


def analyze(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    lengths: Lengths | None = None,
    logits: str = "keep",
    meta_as: torch.device | None = None,
) -> Facts:
    """Run the passes from capture to share on what Dynamo hands to a backend.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        lengths: which sizes of the inputs are the sequence length
            (`s1_capture.sequence_length.find_lengths`); None keeps every symbol apart, and there must be only
            one.
        logits: what becomes of wide outputs, see `outputs`.
        meta_as: device on which tensors of the meta device are taken to be, see `capture`.

    Raises:
        PassError: a pass failed.
    """
    captured: CapturedGraph = _run("capture", capture, module, example_inputs, lengths, meta_as)
    captured = _run("autocast", autocast, captured)
    captured = _run("normalize", normalize, captured)
    facts: Facts = _run("axes", axes, captured)
    _check_sequence(facts)
    facts.placeless = any(isinstance(v, torch.Tensor) and v.is_meta for v in example_inputs)
    facts = _run("footprints", footprints, facts)
    facts = _run("order", order, facts)
    facts = _run("outputs", outputs, facts, logits)
    facts = _run("segment", segment, facts)
    return _run("share", share, facts)


def _check_sequence(facts: Facts) -> None:
    """Nothing that is asked of fake tensors may make a constant of the sequence length.

    Raises:
        PassError: it did, and the other passes would take the length of one call for that of all.
    """
    inputs = [n for n in facts.nodes if n.op == "placeholder" and tensors_of(n)]
    if facts.sequence is not None and not any(facts.carries(n) for n in inputs):
        raise PassError("axes", RuntimeError("the sequence length has become a constant"))


def _run(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a pass: one line in the log (INFO), the program after it (DEBUG), and its name in an error."""
    start = time.perf_counter()
    try:
        result = function(*args)
    except Exception as error:
        raise PassError(name, error) from error
    report(name, result, time.perf_counter() - start)
    return result
