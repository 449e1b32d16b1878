"""Each pass over a step: what it changes in the instructions of small steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from golden import check_golden
from golden_graphs import difference, sections
from recurrent import recurrent
from test_sharded_step import sharded, with_engine
from test_step_program import parts

from streambp_fx.passes.pipeline.runner import run_passes
from streambp_fx.passes.s2_prove.independent_samples import batch_size
from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.program import StepProgram
from streambp_fx.passes.s6_schedule.step_parts import StepParts
from streambp_fx.passes.s6_schedule.text import step_text
from streambp_fx.passes.s6_schedule.transforms import STEP_PASSES, Scheduling, StepPass, StepSettings

# By pass and case: the parts of a step, and what else it is made with.
Case = tuple[Callable[[], StepParts], dict[str, Any]]
KEPT = frozenset(range(9))
ROWS_ON_DISK = Policy(offload="disk", offload_rows=True)
CASES: dict[str, dict[str, Case]] = {
    "keep_inputs_of_groups": {
        "every second of five layers": (lambda: parts(Policy(every=2)), {}),
        "every third, the embedding is the head's weight": (lambda: parts(Policy(every=3), tied=True), {}),
        "all of two layers, whose input is returned": (
            lambda: parts(Policy(every=9), count=2, shown=True),
            {},
        ),
    },
    "run_chunks_first": {
        "two layers": (lambda: parts(Policy(order="chunks"), count=2), {}),
        "a loss that is not linear in its rows": (
            lambda: parts(Policy(order="chunks"), count=2, linear=False),
            {},
        ),
        "after a part that runs whole": (lambda: parts(Policy(order="chunks"), count=2, whole=True), {}),
    },
    "keep_states": {
        "two layers": (lambda: recurrent(2), {"kept_states": KEPT}),
        "two layers, one of them frozen": (lambda: recurrent(2, False), {"kept_states": KEPT}),
        "nothing but attention": (lambda: parts(count=1), {"kept_states": KEPT}),
    },
    "overwrite_rows_of_loss": {
        "a layer and a head": (lambda: parts(count=1), {}),
        "logits that are computed when read": (lambda: parts(count=1, logits=True), {}),
        "two sweeps over the head": (lambda: parts(count=1, linear=False), {}),
    },
    "move_rows": {
        "two layers": (lambda: parts(ROWS_ON_DISK, count=2), {}),
        "rows that the caller is given": (lambda: parts(ROWS_ON_DISK, count=2, shown=True), {}),
        "groups of layers": (lambda: parts(replace(ROWS_ON_DISK, every=2), count=4), {}),
    },
    "move_what_is_kept": {
        "inputs of layers": (lambda: parts(Policy(offload="disk"), count=2), {}),
        "beside attention that is kept": (lambda: parts(Policy("attention", 1, "disk"), count=2), {}),
        "groups of layers": (lambda: parts(Policy(every=2, offload="disk"), count=4), {}),
    },
    "leave_out_rows": {
        "two layers": (lambda: parts(count=2), {"left_out": True}),
        "groups of layers": (lambda: parts(Policy(every=2), count=4), {"left_out": True}),
        "chunks first": (lambda: parts(Policy(order="chunks"), count=2), {"left_out": True}),
    },
    "share_rows": {
        "two layers": (lambda: parts(count=2), {"several": True}),
        "a part that runs whole": (lambda: parts(count=1, whole=True), {"several": True}),
        "groups of layers": (lambda: parts(Policy(every=2), count=4), {"several": True}),
    },
    "take_parameters": {
        "each layer's": (lambda: sharded(count=2), {}),
        "not again in the backward": (lambda: sharded(forward_only=True, count=2), {}),
        "some around the call": (with_engine, {}),
    },
    "reduce_gradients": {
        "each layer's": (lambda: sharded(count=2), {}),
        "buckets": (lambda: with_engine(buckets=True), {}),
        "some around the call": (with_engine, {}),
    },
    "drop_what_nobody_reads": {
        "one layer": (lambda: parts(count=1), {}),
        "a part that runs whole": (lambda: parts(count=1, whole=True, shifted=True), {}),
        "groups of layers": (lambda: parts(Policy(every=2), count=3), {}),
    },
    "fold_layers": {
        "four layers": (lambda: parts(count=4), {}),
        "a layer alone": (lambda: parts(count=1), {}),
        "groups of layers": (lambda: parts(Policy(every=2), count=5), {}),
    },
}
# Those that change what is done within a segment.
WITHIN = {"move_rows", "keep_states", "overwrite_rows_of_loss", "leave_out_rows", "share_rows"}


def changed_by(name: str, own: StepParts, **settings: Any) -> str:
    """What a pass changes, a line of context around each change."""
    sizes = {str(v): k for k, v in {"T": own.facts.sequence, "B": batch_size(own.facts)}.items()}

    def text(program: StepProgram) -> str:
        found = step_text(program, procedures=name in WITHIN)
        return re.sub(r"\bs\d+\b", lambda size: sizes[size[0]], found)

    texts = [text(schedule(own))]
    changes: dict[str, str] = {}

    def verify(one: StepPass, made: Scheduling) -> None:
        texts.append(text(made.program))
        changes[one.name] = difference(*texts[-2:], one.name)

    run_passes(STEP_PASSES, Scheduling(schedule(own)), StepSettings(own, **settings), verify, checked=True)
    return changes[name]


@pytest.mark.parametrize("name", CASES)
def test_what_a_pass_changes(name: str) -> None:
    found = [(case, changed_by(name, make(), **settings)) for case, (make, settings) in CASES[name].items()]
    check_golden(sections(*found), __file__, f"step_pass_{name}")


def test_every_pass_has_cases() -> None:
    assert list(CASES) == [p.name for p in STEP_PASSES] and all(len(c) >= 3 for c in CASES.values())
