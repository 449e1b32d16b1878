"""The compiler: passes over one captured graph, over the programs of a chunk, and over the step, by stage.

`PASSES` below run, in this order, when a graph is captured. What they prove is asked when it is needed::

    s2_prove     linear_loss          is the loss linear in its rows: one sweep over the head, or two
                 independent_samples  are the samples of a batch independent: may some run without the others
    s4_trace     chunk_program        a segment as a program over a chunk: rows -> state -> rows
                                      (`chunk_ops`, `prefix_attention`, `attention_kernels`)
                 vjp                  that and its joint VJP as FX graphs, symbolic in chunk and prefix
    s5_lower     `PROGRAM_PASSES`     FX graph -> Python on eager kernels, once for identical segments
    step         build, checker       the programs of a segment in loops over its chunks, as instructions
    s6_schedule  build, `STEP_PASSES` the instructions of the whole step, under the memory policy
                                      (`s3_cut.policy`); checked

`streambp_fx.runtime` interprets the instructions, `streambp_fx.cost` counts what they hold, and
`streambp_fx.show` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph.facts import CapturedGraph, Facts, PassError
from .graph.symbols import Lengths
from .pipeline.runner import Pass, check_optional, check_order, run_passes
from .pipeline.verifier import verify_facts
from .s1_capture.autocast import autocast
from .s1_capture.capture import capture
from .s1_capture.normalize import normalize
from .s1_capture.rewrites import (  # noqa: F401  (register their rewrites)
    attention_sinks,
    convolutions,
    fills,
    other_names,
    products,
    slices,
    split_losses,
)
from .s1_capture.row_selections import row_selections
from .s2_prove.axes import axes, check_sequence
from .s2_prove.branches import branches
from .s2_prove.footprints import footprints
from .s2_prove.trained_bias import trained_bias
from .s3_cut.lazy_outputs import lazy_outputs
from .s3_cut.segment import segment
from .s3_cut.signatures import signatures
from .s3_cut.widen_late import widen_late
from .s5_lower.lower import PROGRAM_PASSES
from .s6_schedule.transforms import STEP_PASSES

__all__ = ["PASSES", "PROGRAM_PASSES", "STEP_PASSES", "PassError", "analyze"]


@dataclass(frozen=True)
class Request:
    """What is compiled, and how; see `analyze`."""

    module: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    lengths: Lengths | None = None
    logits: str = "keep"


GraphPass = Pass[Any, Request]  # from a captured graph or facts to facts, but for the first

PASSES: tuple[GraphPass, ...] = (
    Pass(
        "capture",
        "Dynamo graph -> one functional pre-dispatch ATen graph, symbolic in the sequence length",
        lambda _, request: capture(request.module, request.example_inputs, request.lengths),
        gives=("graph",),
        autocast=True,
    ),
    Pass(
        "autocast",
        "the casts that autocast makes inside ops, as ops",
        lambda graph, _: autocast(graph),
        needs=("graph",),
    ),
    Pass(
        "normalize",
        "no dead code, no no-ops, grouped heads handed to the kernel, losses split into rows",
        lambda graph, _: normalize(graph),
        needs=("graph",),
        gives=("normal form",),
    ),
    Pass(
        "trained_bias",
        "a trained bias of rows and columns is made by each attention that reads it",
        lambda graph, _: trained_bias(graph),
        needs=("normal form",),
    ),
    Pass(
        "branches",
        "branches on data that change only the rows that are asked about are always taken",
        lambda graph, _: branches(graph),
        needs=("normal form",),
    ),
    Pass(
        "row_selections",
        "ops on rows that are selected by their values, up to where they are put back, as one op",
        lambda graph, _: row_selections(graph),
        needs=("normal form",),
    ),
    Pass(
        "axes",
        "which dim of each value carries the sequence, by op rules (`rules/`), never by size",
        lambda graph, _: check_sequence(axes(graph)),
        needs=("normal form",),
        gives=("kinds", "layouts", "gradients"),
    ),
    Pass(
        "footprints",
        "which rows a row reads: [i, i], a window, [0, i] or all; proved from the masks (`masks/`)",
        lambda facts, _: footprints(facts),
        needs=("kinds", "layouts"),
        gives=("reach",),
    ),
    Pass(
        "widen_late",
        "wide values are made as late as they can be",
        lambda facts, _: widen_late(facts),
        needs=("reach",),
        optional=True,
    ),
    Pass(
        "lazy_outputs",
        "wide values next to a loss (logits) are computed when somebody reads them",
        lambda facts, request: lazy_outputs(facts, request.logits),
        needs=("reach", "gradients"),
    ),
    Pass(
        "segment",
        "cuts where the fewest bytes are alive, so that a segment holds one level of mixing",
        lambda facts, _: segment(facts),
        needs=("reach", "layouts"),
        gives=("segments",),
    ),
    Pass(
        "signatures",
        "identical segments share one set of programs",
        lambda facts, _: signatures(facts),
        needs=("segments",),
        gives=("signatures",),
    ),
)


for _passes in (PASSES, PROGRAM_PASSES, STEP_PASSES):
    check_order(_passes)
check_optional()  # those that the environment names


def analyze(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    lengths: Lengths | None = None,
    logits: str = "keep",
) -> Facts:
    """Run `PASSES` on what Dynamo hands to a backend.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        lengths: which sizes of the inputs are the sequence length
            (`s1_capture.sequence_length.find_lengths`); None keeps every symbol apart, and there must be only
            one.
        logits: what becomes of wide outputs, see `lazy_outputs`.

    Raises:
        PassError: a pass failed.
    """
    request = Request(module, example_inputs, lengths, logits)
    facts: Facts | CapturedGraph | None = run_passes(PASSES, None, request, verify_facts)
    assert isinstance(facts, Facts)
    return facts
